"""Which scheme for which size of vector, on a network that was measured. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from laneway.cluster.costs.measured import MeasuredNetwork, predict
from laneway.cluster.reduce.defaults import host_scheme
from laneway.cluster.reduce.scheme import FLAT, WIRES, ReductionScheme, SchemeTable
from laneway.core import InputError, choice

__all__ = ["SIZES", "candidates", "choose_scheme", "scheme_table"]

SIZES = tuple(1 << power for power in range(12, 29))
"""Bytes at which tables are made: 4 kB to 256 MB, doubling."""
PIECES = (0, 1 << 20, 2 << 20, 4 << 20)
MARGIN = 0.05
"""Flat is kept unless another scheme is faster by this share: a prediction of small messages is not better than that."""
NEIGHBOUR = 0.02
"""A table keeps the scheme of the size before where another one would be faster by less than this share."""


def candidates(sizes: Sequence[int], wires: Sequence[str] = ("fp32",), drop: float = 0.0) -> list[ReductionScheme]:
    """Schemes that are compared: flat, and direct exchanges at every level, whole and in pieces.

    Args:
        sizes: members of each level, innermost first.
        wires: allowed between hosts; the innermost level stays in fp32. Choosing fp32 alone changes no number beyond rounding.
        drop: share that the outermost level drops in all but the flat scheme; 0: none.

    Raises:
        InputError: no level, an unknown wire.
    """
    if not sizes:
        raise InputError("sizes", sizes, "members of one level or more")
    found = [FLAT]
    for wire in wires:
        choice("wires", wire, WIRES)
        found += [host_scheme(len(sizes), wire=wire, drop=drop, chunk_bytes=pieces) for pieces in PIECES]
    return found


def choose_scheme(
    network: MeasuredNetwork, nbytes: float, schemes: Sequence[ReductionScheme] | None = None
) -> tuple[ReductionScheme, dict[ReductionScheme, float]]:
    """The scheme for one size, and the predicted seconds of all that were compared; flat unless another wins by `MARGIN`.

    Raises:
        InputError: schemes of other levels than the network's.
    """
    schemes = candidates(network.sizes) if schemes is None else schemes
    seconds = {scheme: predict(network, scheme, nbytes) for scheme in schemes}
    best = min(seconds, key=lambda scheme: seconds[scheme])
    if FLAT in seconds and seconds[best] > seconds[FLAT] * (1 - MARGIN):
        best = FLAT
    return best, seconds


def scheme_table(network: MeasuredNetwork, schemes: Sequence[ReductionScheme] | None = None) -> SchemeTable:
    """A scheme for each size, changed only where it gains.

    Raises:
        InputError: schemes of other levels than the network's.
    """
    rows: list[tuple[int, ReductionScheme]] = []
    for nbytes in SIZES:
        best, seconds = choose_scheme(network, nbytes, schemes)
        if rows and seconds[rows[-1][1]] <= seconds[best] * (1 + NEIGHBOUR):
            continue
        rows.append((nbytes if rows else 0, best))
    return SchemeTable(tuple(rows))
