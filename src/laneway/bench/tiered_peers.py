"""Other ways to need less memory for saved tensors: what torch offers, and what people write."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

SAVED_OPS = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
]


@contextmanager
def nothing(model: nn.Module) -> Generator[None]:
    """Plain training."""
    yield


@contextmanager
def checkpointed(model: nn.Module, count: int | None = None) -> Generator[None]:
    """``torch.utils.checkpoint`` around every block, or the first ``count``: its dial."""
    with _each_block(model, {}, count):
        yield


@contextmanager
def selective(model: nn.Module) -> Generator[None]:
    """Selective checkpointing: products and attention are saved, the rest is computed again."""

    def policy(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in SAVED_OPS else CheckpointPolicy.PREFER_RECOMPUTE

    with _each_block(model, {"context_fn": lambda: create_selective_checkpoint_contexts(policy)}):
        yield


@contextmanager
def saved_on_host(model: nn.Module) -> Generator[None]:
    """What ``torch.autograd.graph.save_on_cpu`` does beside an accelerator: every saved tensor is copied, and copied back.

    On the CPU the copy is written to a file, or nothing would be saved; the copying waits, as there.
    """
    with tempfile.TemporaryFile() as file:
        yield from _through(_WaitingFile(file.fileno()))


@contextmanager
def saved_by_torch_save(model: nn.Module) -> Generator[None]:
    """The hooks of torch's tutorial: ``torch.save`` of every saved tensor to a file of its own, ``torch.load`` at its use."""
    with tempfile.TemporaryDirectory() as folder:
        yield from _through(_Files(Path(folder)))


class _WaitingFile:
    def __init__(self, descriptor: int) -> None:
        self.descriptor, self.end = descriptor, 0

    def pack(self, tensor: Tensor) -> tuple[int, Tensor] | Tensor:
        if isinstance(tensor, nn.Parameter):
            return tensor.detach()
        flat = tensor.detach().contiguous()
        data = _bytes(flat)
        at, self.end = self.end, self.end + len(data)
        while len(data):
            data = data[os.pwrite(self.descriptor, data, at + flat.nbytes - len(data)) :]
        return at, torch.empty_like(flat, device="meta")

    def unpack(self, held: tuple[int, Tensor] | Tensor) -> Tensor:
        if isinstance(held, Tensor):
            return held
        at, like = held
        found = torch.empty_like(like, device="cpu")
        os.preadv(self.descriptor, [_bytes(found)], at)
        return found


def _bytes(tensor: Tensor) -> Any:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


class _Files:
    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0

    def pack(self, tensor: Tensor) -> Path:
        self.count += 1
        path = self.folder / str(self.count)
        torch.save(tensor.detach().clone() if tensor._is_view() else tensor.detach(), path)
        return path

    def unpack(self, held: Path) -> Tensor:
        found: Tensor = torch.load(held)
        return found


def _through(keeper: _WaitingFile | _Files) -> Generator[None]:
    with torch.autograd.graph.saved_tensors_hooks(keeper.pack, keeper.unpack):
        yield


@contextmanager
def _each_block(model: nn.Module, options: dict[str, Any], count: int | None = None) -> Generator[None]:
    blocks = list(model.blocks)[:count]  # type: ignore[arg-type]
    plain = [block.forward for block in blocks]
    for block, forward in zip(blocks, plain, strict=True):
        block.forward = lambda *args, forward=forward: checkpoint(forward, *args, use_reentrant=False, **options)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


PEERS = {
    "none": nothing,
    "checkpoint": checkpointed,
    "selective": selective,
    "save_on_cpu": saved_on_host,
    "torch_save": saved_by_torch_save,
}
