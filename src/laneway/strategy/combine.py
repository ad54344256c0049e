"""What of a layout can't be applied, or not together: each is refused by its name, before anything is touched."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from laneway.cluster.layout import Layout
from laneway.cluster.mesh import AXES
from laneway.core import InputError, choice, positive_int
from laneway.models.gpt import GPT
from laneway.strategy.data_parallel import data_parallel_kind

__all__ = ["check_combination"]


def check_combination(model: nn.Module, layout: Layout, memory: Any, schedule: str, schedules: tuple[str, ...]) -> None:
    """Raise for the first thing that can't be applied.

    Raises:
        InputError: names the field, and what would do.
    """
    if isinstance(model, DistributedDataParallel | FSDPModule) or any(isinstance(m, FSDPModule) for m in model.modules()):
        raise InputError("model", type(model).__name__, "a model that nothing has wrapped")
    for name in (*AXES, "ep", "micro_batch", "chunks"):
        positive_int(f"layout.{name}", getattr(layout, name))
    choice("layout.recompute", layout.recompute, ("none", "selective", "full"))
    choice("schedule", schedule, schedules)
    _check_numbers(layout)
    _check_degrees(model, layout)
    if memory is not None and (layout.tp > 1 or layout.pp > 1):
        axis = "tp" if layout.tp > 1 else "pp"
        hint = "the memory manager follows whole forward and backward passes of whole tensors; use layout.recompute instead"
        raise InputError("memory", memory, f"None with layout.{axis} > 1", hint)


def _check_numbers(layout: Layout) -> None:
    if layout.precision == "fp8":
        raise InputError("layout.precision", "fp8", "fp32 or bf16", "fp8 matrix products are not built in")
    choice("layout.precision", layout.precision, ("fp32", "bf16"))
    if layout.zero not in (1, 2, 3):
        raise InputError("layout.zero", layout.zero, "1, 2 or 3")
    if layout.grad_bytes not in (2, 4):
        raise InputError("layout.grad_bytes", layout.grad_bytes, "2 (bf16) or 4 (fp32)")
    if not layout.overlap_grads and data_parallel_kind(layout) == "fsdp":
        raise InputError("layout.overlap_grads", False, "True with dp_shard > 1: FSDP2 always reduces during the backward pass")


def _check_degrees(model: nn.Module, layout: Layout) -> None:
    ours = isinstance(model, GPT)
    if layout.cp > 1:
        raise InputError("layout.cp", layout.cp, "1", "attention over sequences that are split between ranks is not built in")
    if layout.ep > 1:
        raise InputError("layout.ep", layout.ep, f"1: {type(model).__name__} has no experts")
    if layout.chunks > 1 and layout.pp == 1:
        raise InputError("layout.chunks", layout.chunks, "1 without pipeline stages (layout.pp = 1)")
    if layout.pp > 1 and not ours:
        raise InputError("layout.pp", layout.pp, f"1 for {type(model).__name__}; stages are cut from laneway's GPT")
    if layout.sequence_parallel and layout.tp > 1 and not ours:
        raise InputError("layout.sequence_parallel", True, f"False for {type(model).__name__}; it needs laneway's GPT")
