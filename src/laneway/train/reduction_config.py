"""How a run's gradients go over the network."""

from __future__ import annotations

from dataclasses import dataclass

from laneway.cluster.reduce.scheme import LEAST_CHUNK, WIRES, LevelScheme
from laneway.cluster.topology import Topology
from laneway.core import InputError, choice, collect, positive_int, problems_of

OVER = ("flat", "levels", "auto")
SHARD = ("all", "hosts")


@dataclass(frozen=True)
class ReductionConfig:
    """Gradients over the levels of the network; by default one flat collective, as torch does it."""

    over: str = "flat"
    """flat | levels: sums inside each host first, then between hosts, then between racks | auto: one or the other
    for each size of bucket, as the network is measured at the start (a resumed run may then differ in rounding)."""
    topology: str = ""
    """Which ranks share a host and a rack, as ``2xCPU_2nodes_2racks`` or a file; empty: as the ranks find themselves."""
    wire: str = "fp32"
    """fp32 | bf16 | int8: what travels between hosts; sums stay in fp32."""
    drop: float = 0.0
    """Share of the gradient that stays at home at the outermost level in a step and is fed back later; 0: none (ddp, or
    fsdp with ``shard = hosts``)."""
    chunk_bytes: int = 2 * 2**20
    """Pieces of a bucket that follow each other through the levels; 0: whole buckets; auto chooses by itself."""
    adapt: bool = False
    """Watch the network: while a link is slow, other algorithms and narrower wires, and under ddp gradients that stay at home for
    some steps, then back; on CPUs (gloo)."""
    shard: str = "all"
    """all | hosts: fsdp shards over all ranks, or over the ranks of each host with a copy in every host."""

    @property
    def levels(self) -> bool:
        """Whether gradients may go over levels."""
        return self.over != "flat"

    def problems(self, prefix: str = "reduction") -> list[InputError]:
        """Everything that is wrong with these fields, one error a field."""
        return problems_of(self, f"{prefix}.", lambda sound: sound._out_of_range(prefix))

    def _out_of_range(self, prefix: str) -> list[InputError]:
        found = collect(
            [
                lambda: choice(f"{prefix}.over", self.over, OVER),
                lambda: choice(f"{prefix}.wire", self.wire, WIRES),
                lambda: choice(f"{prefix}.shard", self.shard, SHARD),
                lambda: self.chunk_bytes == 0 or positive_int(f"{prefix}.chunk_bytes", self.chunk_bytes, LEAST_CHUNK),
                lambda: Topology.parse(self.topology) if self.topology else None,
                lambda: LevelScheme(drop=self.drop),
            ]
        )
        for name, plain in (("topology", ""), ("wire", "fp32"), ("drop", 0.0), ("shard", "all"), ("adapt", False)):
            if not found and not self.levels and getattr(self, name) != plain:
                accepted = f"{plain!r} with reduction.over = {self.over}"
                found.append(InputError(f"{prefix}.{name}", getattr(self, name), accepted, "--reduction.over levels"))
        return found
