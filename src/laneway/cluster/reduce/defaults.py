"""The scheme that does best for large vectors where levels differ in speed. No torch here."""

from __future__ import annotations

from laneway.cluster.reduce.scheme import WIRES, LevelScheme, ReductionScheme
from laneway.core import choice, positive_int

__all__ = ["PIECE_BYTES", "direct_scheme", "host_scheme"]

PIECE_BYTES = 2 << 20
"""Pieces follow each other from twice this size on; smaller vectors go in one, without a change of threads."""


def direct_scheme(levels: int, *, outer_wire: str = "fp32", chunk_bytes: int = PIECE_BYTES) -> ReductionScheme:
    """Direct exchanges at every level, in pieces that follow each other from 4 MB up.

    Args:
        levels: how many there are.
        outer_wire: what travels over the outermost one, the others being fp32.
        chunk_bytes: of a piece; 0: one piece.

    Raises:
        InputError: a value out of range.
    """
    positive_int("levels", levels)
    choice("outer_wire", outer_wire, WIRES)
    return ReductionScheme((*(LevelScheme(),) * (levels - 1), LevelScheme(wire=outer_wire)), chunk_bytes)


def host_scheme(levels: int, *, wire: str = "fp32", drop: float = 0.0, chunk_bytes: int = PIECE_BYTES) -> ReductionScheme:
    """Direct exchanges: exact inside a host, that wire between hosts, and the outermost level (or the only one) drops.

    Args:
        levels: how many there are.
        wire: what travels between hosts.
        drop: share that stays at home at the outermost level.
        chunk_bytes: of a piece; 0: one piece.

    Raises:
        InputError: a value out of range.
    """
    positive_int("levels", levels)
    inside = (LevelScheme(), *(LevelScheme(wire=wire),) * (levels - 2)) if levels > 1 else ()
    return ReductionScheme((*inside, LevelScheme(wire=wire, drop=drop)), chunk_bytes)
