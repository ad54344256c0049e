"""What is applied to the single-device model from outside, in this order: chain, checkpointing, compilation, DDP or FSDP2."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from laneway.connections import block_length, shard_connections
from laneway.core import InputError, LanewayError
from laneway.models.gpt import GPT
from laneway.strategy.data_parallel import own_buffers
from laneway.train.config import TrainConfig
from laneway.train.ranks import Ranks
from laneway.train.reduction import RunReduction


@dataclass(frozen=True)
class Parallel:
    """A model made ready for the run's processes.

    ``call`` is what a training step calls; ``model`` is the same model without DDP's wrapper, whose names are the
    checkpoint's names.
    """

    model: GPT
    call: nn.Module
    kind: str
    precision: str
    device: torch.device
    compiled: bool
    reduction: RunReduction | None = None

    def autocast(self) -> torch.autocast | nullcontext[None]:
        """bf16 sub-layers over fp32 parameters. FSDP2 casts by its own policy instead."""
        if self.precision == "fp32" or self.kind == "fsdp":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    @contextmanager
    def accumulating(self, last: bool) -> Generator[None]:
        """Around one micro-batch: gradients are reduced over the ranks in the ``last`` one only."""
        if isinstance(self.call, DistributedDataParallel) and not last:
            with self.call.no_sync():
                yield
            return
        if isinstance(self.call, FSDPModule):
            self.call.set_requires_gradient_sync(last)
        yield

    @contextmanager
    def looking(self) -> Generator[None]:
        """Around forwards that are no part of a training step: no gradients, and FSDP2 gathers afresh afterwards.

        Compiled blocks run eagerly here: a sample grows by a token a forward, and each new length may be compiled anew.
        """
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad(), self.autocast(), torch.compiler.set_stance("force_eager" if self.compiled else "default"):
                yield
        finally:
            self.model.train(was_training)
            if isinstance(self.model, FSDPModule):
                self.model.reshard()

    def row(self) -> dict[str, int]:
        """For the metrics: what the reducer sent, if there is one."""
        return {} if self.reduction is None else self.reduction.row()

    @contextmanager
    def at_work(self) -> Generator[None]:
        """Around a run's steps: afterwards the reducer's threads have ended."""
        done = False
        try:
            yield
            done = True
        finally:
            if self.reduction is not None:
                self.reduction.close(wait=done)

    @property
    def copies(self) -> int:
        """How many ranks hold the same shard."""
        return self.reduction.copies if self.kind == "fsdp" and self.reduction is not None else 1

    @property
    def shares_forward(self) -> bool:
        """Whether a forward of the bare model takes every rank (its weights lie on all of them)."""
        return self.kind == "fsdp"


def resolve(kind: str, world_size: int) -> str:
    """``none``, ``ddp`` or ``fsdp``; raises InputError where the choice can't work with this number of ranks."""
    if kind == "auto":
        return "ddp" if world_size > 1 else "none"
    if kind == "none" and world_size > 1:
        raise InputError("parallel", kind, "auto, ddp or fsdp with several ranks", f"torchrun started {world_size} processes")
    if kind != "none" and world_size == 1:
        raise InputError("parallel", kind, "auto or none with one process", "start several with torchrun --nproc-per-node N")
    return kind


def parallelise(model: GPT, config: TrainConfig, ranks: Ranks) -> Parallel:
    """Apply the configuration's ``activation_checkpointing``, ``recompute_streams``, ``compile`` and ``parallel``, in place."""
    kind = resolve(config.parallel, ranks.world_size)
    model.to(ranks.device)
    model.chained = not (config.activation_checkpointing or config.compile)
    model.recompute = block_length(model.config.sites, model.streams) if config.recompute_streams else 0
    if config.activation_checkpointing:
        for index, block in enumerate(model.blocks):
            model.blocks[index] = checkpoint_wrapper(block, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    if config.compile:
        _need_compiler(ranks.device)
        for block in model.blocks:
            block.compile()
    call: nn.Module = model
    reduction = RunReduction(config.reduction, ranks) if config.reduction.levels and kind != "none" else None
    if kind == "ddp":
        devices = None if ranks.device.type == "cpu" else [ranks.device.index]
        call = DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True, **own_buffers())
    elif kind == "fsdp":
        _shard(model, config, ranks, None if reduction is None else reduction.mesh())
    if reduction is not None:
        reduction.attach(call)
    return Parallel(model, call, kind, config.precision, ranks.device, config.compile, reduction)


def _shard(model: GPT, config: TrainConfig, ranks: Ranks, hosts: DeviceMesh | None) -> None:
    """FSDP2: connections first (their parameters stay fp32), then each block, then what is left at the root."""
    # FSDP2 warns of in-place changes to a view that a module returned; ours are returned by ops and never changed in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor", category=UserWarning)
    mesh = hosts or init_device_mesh(ranks.device.type, (ranks.world_size,))
    low = torch.bfloat16 if config.precision == "bf16" else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
    shard_connections(model, mesh)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def _need_compiler(device: torch.device) -> None:
    if device.type == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++", "cl"))):
        raise LanewayError(
            "compile: torch.compile needs a C++ compiler on the CPU and none was found; install g++ or leave --compile out"
        )
