"""The collectives of a layout: over which levels each goes, and by which algorithm."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from laneway.cluster.costs import Calibration, Group, choose_collective
from laneway.cluster.costs.data import shared_parameters
from laneway.cluster.costs.network import lanes_of
from laneway.cluster.layout import Layout
from laneway.strategy.space import Job

WEIGHT_BYTES = {"fp32": 4, "bf16": 2, "fp8": 2}


@dataclass(frozen=True)
class Collective:
    """One kind of collective of a step.

    Attributes:
        axis: whose ranks take part.
        levels: levels that it crosses, innermost first.
        op: all_reduce, reduce_scatter, all_gather or all_to_all.
        nbytes: bytes of one call's whole vector: a layer's or a bucket's, where it goes in several.
        algorithm: native (NCCL's own choice, by name) or one over levels.
        chunks: pieces that follow each other through the levels.
        seconds, native_seconds: of one call, as chosen and as the native flat collective would.
    """

    axis: str
    levels: tuple[str, ...]
    op: str
    nbytes: float
    algorithm: str
    chunks: int
    seconds: float
    native_seconds: float

    @property
    def told(self) -> str:
        """Where, how long, and what the native one would take."""
        text = f"{self.op} of {self.nbytes / 1e9:.3g} GB over {'+'.join(self.levels)}: {self.seconds:.3g} s"
        if self.seconds == self.native_seconds:
            return text + ", nothing beats the native one"
        return f"{text} instead of {self.native_seconds:.3g} s by the native one"


def collectives(job: Job, layout: Layout, calibration: Calibration | None = None) -> list[Collective]:
    """The collectives of one step, one row a kind; none for an axis of size 1."""
    found = []
    for axis, op, nbytes, group in _calls(job, layout):
        lanes = lanes_of(group, job.topology, calibration or Calibration())
        chosen = choose_collective(op, nbytes, job.topology, group=group, calibration=calibration)
        names = tuple(lanes.names[level] for level in lanes.crossed)
        seconds, native = chosen.seconds.value, chosen.native_seconds.value
        found.append(Collective(axis, names, op, nbytes, chosen.algorithm, chosen.chunks, seconds, native))
    return found


def _calls(job: Job, layout: Layout) -> Iterator[tuple[str, str, float, Group]]:
    arch, width = job.arch, WEIGHT_BYTES[layout.precision]
    tokens = layout.micro_batch * job.seq_len / layout.cp
    if layout.tp > 1:
        yield "tp", "all_reduce", tokens * arch.hidden * width, Group(layout.tp)
    if layout.ep > 1:
        routed = tokens * arch.hidden * width * max(1, arch.experts_per_token)
        yield "ep", "all_to_all", routed, Group(layout.ep, layout.tp)
    for part in shared_parameters(arch, layout):
        size, inner = part.shards.size, layout.tp * layout.cp * layout.dp_shard
        if size > 1:
            one = part.parameters / part.messages
            yield "dp_shard", "reduce_scatter", one * layout.grad_bytes, part.shards
            yield "dp_shard", "all_gather", one * width, part.shards
        if layout.dp_replicate > 1:
            one = part.parameters / size / part.messages
            yield "dp_replicate", "all_reduce", one * layout.grad_bytes, Group(layout.dp_replicate, inner)
