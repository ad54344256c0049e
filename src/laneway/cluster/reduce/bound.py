"""How far a reduction may be from the exact sum. No torch here."""

from __future__ import annotations

from collections.abc import Sequence

from laneway.cluster.reduce.scheme import LevelScheme, ReductionScheme

__all__ = ["ROUNDING", "error_bound"]

ROUNDING = {"fp32": 0.0, "bf16": 2.0**-9, "int8": 1 / 254}
"""The largest error of one number on each wire: of itself, or for int8 of the largest in its block."""
PAIRWISE = 32


def error_bound(scheme: ReductionScheme, sizes: Sequence[int], *, double: bool = False) -> float:
    """The largest error of a sum or mean, before its rounding to the tensor's type.

    With direct exchanges (all_to_all) and trees it doesn't grow with the ranks: numbers are added in pairs, a rounding for each
    doubling of the ranks, and 32 of those are counted (2³² ranks); on a narrow wire a number is rounded once on each way over a
    level. Rings, tori and the backend's own sums add one number after the other: one rounding of the sum's type a member.

    Args:
        scheme: how it goes over the levels.
        sizes: members of each level, innermost first (`LevelGroups.sizes`).
        double: sums in fp64 instead of fp32.

    Returns:
        The error as a share of Σ|x| over the ranks, element by element; where a level's wire is int8, of Σ max|x| over the ranks,
        the maximum being over the vector.
    """
    unit = 2.0**-53 if double else 2.0**-24
    world = 1
    for size in sizes:
        world *= size
    if scheme.flat:
        return world * unit
    factor = 1 + (PAIRWISE + 1) * unit
    for level, size in zip(scheme.levels, sizes, strict=True):
        if size > 1:
            factor *= (1 + _in_a_row(level, size) * unit) * (1 + ROUNDING[level.wire]) ** 2
    return factor - 1


def _in_a_row(level: LevelScheme, size: int) -> int:
    if level.algorithm == "torus":
        return sum(axis - 1 for axis in level.dims)
    return size - 1 if level.algorithm in ("ring", "native") else 0
