"""A plan tried out without devices: one rank of a job of any size, on fake process groups and tensors without storage."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from laneway.cluster.architecture import Architecture
from laneway.cluster.layout import Layout
from laneway.cluster.mesh import AXES, axis_sizes
from laneway.cluster.topology import Topology
from laneway.core import InputError, LanewayError
from laneway.strategy.decoder import decoder
from laneway.strategy.norms import local
from laneway.strategy.wrap import wrap_model

__all__ = ["DryRun", "dry_run"]


@dataclass(frozen=True)
class DryRun:
    """What one rank of a job came to.

    Attributes:
        seconds: wall time of building, splitting and sharding the model on this machine.
        peak_bytes: largest resident set of this process meanwhile, with all that it held before.
        parameters_on_rank: elements of the parameters that the rank keeps (the largest shard where they do not divide evenly).
        bytes_on_rank: their bytes.
        groups: ranks in this rank's process group of each axis.
        layers_on_rank: blocks of the rank's stages.
    """

    seconds: float
    peak_bytes: int
    parameters_on_rank: int
    bytes_on_rank: int
    groups: dict[str, int]
    layers_on_rank: int


def dry_run(
    layout: Layout,
    arch: Architecture,
    world: int | None = None,
    *,
    topology: Topology | None = None,
    seq_len: int = 2048,
    rank: int = 0,
) -> DryRun:
    """Lay ``arch`` over fake ranks, as ``wrap_model`` would, seen from ``rank``.

    The model has no storage, so 175 billion parameters cost this machine what their module objects cost.

    Args:
        layout: degrees and dials.
        arch: the model.
        world: number of ranks; None: the topology's, or what the layout needs.
        topology: of as many devices.
        seq_len: longest sequence in tokens.
        rank: whose part is built.

    Raises:
        InputError: a rank outside of the world, or what ``wrap_model`` refuses.
        LanewayError: the layout needs another number of ranks; this process has a process group already.
    """
    if world is None:
        world = layout.world if topology is None else topology.world
    if not 0 <= rank < world:
        raise InputError("rank", rank, f"0 to {world - 1}")
    with _fake_ranks(rank, world):
        _forget_peak()
        start = time.perf_counter()
        model = wrap_model(decoder(arch, context=seq_len), layout, topology=topology, order=range(world), device="cpu")
        seconds = time.perf_counter() - start
        held = [local(parameter) for parameter in model.parameters()]
        return DryRun(
            seconds,
            _peak(),
            sum(tensor.numel() for tensor in held),
            sum(tensor.numel() * tensor.element_size() for tensor in held),
            dict(zip(AXES, axis_sizes(layout), strict=True)),
            sum(name.endswith(".norm_ffn.weight") for name, _ in model.named_parameters()),
        )


@contextmanager
def _fake_ranks(rank: int, world: int) -> Generator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise LanewayError("a dry run makes fake process groups of its own: run it in a process without a process group")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _forget_peak() -> None:
    """Let the peak of the resident set begin anew, where Linux allows it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def _peak() -> int:
    """Largest resident set since ``_forget_peak``, or of the process's life where the system keeps nothing else."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        unit = 1 if os.uname().sysname == "Darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
