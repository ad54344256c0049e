"""The ways to reduce, scatter and gather that `laneway bench collectives` compares. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from laneway.cluster.reduce.scheme import FLAT, LevelScheme, ReductionScheme

__all__ = ["KEPT", "OPS", "PIECE_BYTES", "VARIANTS", "Variant", "scheme_of"]

OPS = ("all_reduce", "reduce_scatter", "all_gather")
PIECE_BYTES = 2 << 20
"""Of pieces that follow each other through the levels."""
KEPT = 0.1
"""Share of the entries that `levels_drop` sends between racks in a call."""
SMALL_BYTES = 256 << 10
"""The reducer with a flat scheme is timed up to here: what a choice of flat costs where messages are small."""


@dataclass(frozen=True)
class Variant:
    """One way.

    Attributes:
        ops: operations it is there for.
        native: the backend's own collective over all ranks; otherwise laneway's reducer over the levels.
        order: of the native one's ranks: "packed" rack by rack, "spread" over racks in turns.
        host_wire, rack_wire: format between hosts of a rack and between racks (all ranks for the native one: host_wire).
        pieces: whether pieces of a large vector follow each other; how many times as long as pieces usually are.
        drop: share of the entries that stay at home between racks.
        most_bytes: largest message it is timed for; 0: any.
    """

    ops: tuple[str, ...]
    native: bool = False
    order: str = "packed"
    host_wire: str = "fp32"
    rack_wire: str = "fp32"
    pieces: int = 0
    drop: float = 0.0
    flat: bool = False
    most_bytes: int = 0

    def fits(self, op: str, nbytes: int) -> bool:
        """Whether it is timed for this operation and size."""
        return op in self.ops and not (self.most_bytes and nbytes > self.most_bytes)


REDUCE, SUMS = ("all_reduce",), ("all_reduce", "reduce_scatter")
VARIANTS = {
    "flat": Variant(OPS, native=True),
    "flat_spread": Variant(OPS, native=True, order="spread"),
    "flat_bf16": Variant(REDUCE, native=True, host_wire="bf16", rack_wire="bf16"),
    "reducer_flat": Variant(OPS, flat=True, most_bytes=SMALL_BYTES),
    "levels": Variant(OPS),
    "levels_pipelined": Variant(OPS, pieces=1),
    "levels_bf16_rack": Variant(SUMS, rack_wire="bf16", pieces=1),
    "levels_bf16_hosts": Variant(SUMS, host_wire="bf16", rack_wire="bf16", pieces=1),
    "levels_int8": Variant(SUMS, host_wire="int8", rack_wire="int8", pieces=1),
    "levels_drop": Variant(REDUCE, host_wire="bf16", rack_wire="bf16", pieces=4, drop=1 - KEPT),
}
"""levels: hosts, racks and ranks of a host are three levels, with a direct exchange at each. Where most is dropped, there
is little to wait for on the outer link: longer pieces, which cost less work, are faster there."""


def scheme_of(variant: Variant, piece_bytes: int = PIECE_BYTES) -> ReductionScheme:
    """What the reducer is told."""
    if variant.native or variant.flat:
        return FLAT
    outer = LevelScheme(wire=variant.rack_wire, drop=variant.drop)
    return ReductionScheme((LevelScheme(), LevelScheme(wire=variant.host_wire), outer), piece_bytes * variant.pieces)
