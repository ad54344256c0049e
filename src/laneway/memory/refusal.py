"""What survival can't do, and what it says then."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from laneway.core import LanewayError
from laneway.memory.oom import Failure


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 sharded the model or a part of it."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(module, FSDPModule) for module in model.modules())


def refuse_communication(model: nn.Module, agreed: bool) -> None:
    """Refuse a model whose micro-batch one rank can't leave in the middle.

    Args:
        agreed: the ranks agree after each micro-batch whether it went through.

    Raises:
        LanewayError: DDP without agreement; or with it DDP that broadcasts buffers, or SyncBatchNorm.
    """
    ddp = isinstance(model, DistributedDataParallel)
    if ddp and not agreed:
        raise LanewayError(
            "DDP reduces gradients within the backward pass, which a rank that ran out of memory can't repeat alone; give agree "
            "(an Agreement) and average with reduce_gradients"
        )
    if isinstance(model, DistributedDataParallel) and model.will_sync_module_buffers():
        raise LanewayError(
            "DDP broadcasts the model's buffers in its forward pass, where a rank that ran out of memory would leave the others "
            "waiting; make it with broadcast_buffers=False (forward_sync_buffers=False in newer torch)"
        )
    if agreed and any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        raise LanewayError(
            "SyncBatchNorm communicates in the forward pass, where a rank that ran out of memory would leave the others waiting"
        )


def cannot_repeat(failure: Failure) -> LanewayError:
    """Of a model that FSDP2 sharded."""
    return LanewayError(
        f"out of memory in {failure.where}: {_wanted(failure)}. Under FSDP2 a micro-batch can't be run again: its collectives "
        "are inside forward and backward, and other ranks may be waiting in one; lower micro_batch_size or the memory budget"
    )


def does_not_fit(tries: int, failure: Failure | None, budget: float | None, split: bool) -> LanewayError:
    """After the last try of a micro-batch.

    Args:
        tries: how many there were.
        failure: the last one; None: it was another rank's.
        budget: the manager's, in bytes; None: no manager.
        split: whether splitting was allowed.
    """
    if failure is None:
        return LanewayError(f"another rank ran out of memory in each of {tries} tries of a micro-batch; see its error")
    have = "no memory budget" if budget is None else f"a budget of {_mib(budget)}"
    changes = ["lower micro_batch_size", *([] if split else ["allow split"])]
    changes += ["give a memory budget" if budget is None else "lower the budget where others use the device too"]
    return LanewayError(
        f"out of memory in each of {tries} tries of a micro-batch, last in {failure.where}: {_wanted(failure)}, with {have}; "
        f"{', '.join(changes)}, or checkpoint activations"
    )


def _wanted(failure: Failure) -> str:
    return f"{_mib(failure.wanted)} more were needed" if failure.wanted else "memory was missing"


def _mib(nbytes: float) -> str:
    return f"{nbytes / (1 << 20):.1f} MiB"
