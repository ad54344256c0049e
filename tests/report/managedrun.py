"""``memory.json`` of a small model that is trained for real under the memory manager, on a clock that its modules advance."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor, nn

from laneway.memory.clock import VirtualClock
from laneway.memory.config import MemoryConfig
from laneway.memory.manager import MemoryManager
from laneway.memory.residency import Residency
from laneway.memory.simulated import SimulatedTier
from laneway.memory.summary import metrics_of, summary
from laneway.rundir import RunDirectory

UNMANAGED = 20_000  # bytes


class Block(nn.Module):
    """Some saved tensors that can only move, and some that can be computed again."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.act, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x)))).tanh()


class Network(nn.Module):
    """Blocks over an embedding."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def timed(module: nn.Module, clock: VirtualClock) -> None:
    """Let the module's forward and backward pass take time, and its forward pass when it is computed again."""
    forward = module.forward

    def slow(x: Tensor) -> Tensor:
        clock.advance(2e-4)
        return forward(x)

    module.forward = slow
    module.register_full_backward_hook(lambda *_: clock.advance(4e-4))


class Watched:
    """A meter of the managed bytes and a fixed number of others."""

    def __init__(self) -> None:
        self.books: Residency | None = None
        self.high = 0

    def watch(self, books: Residency) -> None:
        """Notice every byte that arrives."""
        self.books, arrive = books, books._arrive

        def noticed(nbytes: int) -> None:
            arrive(nbytes)
            self.high = max(self.high, books.resident)

        books._arrive = noticed  # type: ignore[method-assign]

    def live(self) -> int:
        return UNMANAGED + (self.books.resident if self.books else 0)

    def peak(self) -> int:
        return UNMANAGED + self.high

    def reset_peak(self) -> None:
        self.high = self.books.resident if self.books else 0

    def capacity(self) -> int:
        return 1 << 30


def managed(
    budget: int, depth: int = 3, lengths: tuple[int, ...] = (32, 32, 32), bandwidth: float = 1e7
) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """``summary`` of a model of ``depth`` blocks after a pass of each of these lengths, and each pass's fields of a metrics row.

    ``budget``: bytes; ``bandwidth``: bytes a second.
    """
    torch.manual_seed(0)
    clock, meter = VirtualClock(), Watched()
    model = Network(depth, 16)
    for module in model.blocks.modules():
        if not list(module.children()):
            timed(module, clock)
    tier = SimulatedTier(clock, 1 << 26, bandwidth, 0.8 * bandwidth, 1e-5)
    config = MemoryConfig(budget=str(budget), min_bytes=1)
    manager = MemoryManager(model, config, tier, meter, torch.device("cpu"), clock=clock)
    meter.watch(manager.activations.books)
    with manager:
        for length in lengths:
            model(torch.randint(32, (2, length))).backward()
    manager.close()
    passes = list(manager.passes)
    return json.loads(json.dumps(summary(manager))), [metrics_of([report]) for report in passes]


def put(run: RunDirectory, memory: dict[str, Any]) -> None:
    """``memory.json`` of a run."""
    run.memory.write_text(json.dumps(memory), "utf-8")
