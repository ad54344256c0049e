"""Where the members of a process group sit: how many units of every level a group touches."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import ceil

from laneway.cluster.topology import Topology
from laneway.core import InputError, positive_int

__all__ = ["Group", "Placement", "place"]


@dataclass(frozen=True)
class Group:
    """Ranks base, base + stride, … (`size` of them), and every other group of the same shape beside it.

    Dimensions of a mesh that lie next to each other flatten to one group: sizes multiply, the inner stride stays.
    """

    size: int
    stride: int = 1

    def __post_init__(self) -> None:
        positive_int("group.size", self.size)
        positive_int("group.stride", self.stride)


@dataclass(frozen=True)
class Placement:
    """Units of each level, innermost first, that one group touches: nodes, racks, …; the last is always 1.

    A device counts as the unit below the innermost level: `units_below(0) == size`.
    """

    size: int
    units: tuple[int, ...]

    def units_below(self, level: int) -> int:
        """Members of `levels[level]` that the group touches, over all groups of the level."""
        return self.units[level - 1] if level else self.size

    def fan(self, level: int) -> int:
        """Members of the group in one group of `levels[level]`: 1 where the level is not crossed."""
        return ceil(self.units_below(level) / self.units[level])

    def inside(self, level: int) -> int:
        """Ranks of the group inside one member of `levels[level]`: the fewest, since they share the member's links."""
        return max(1, self.size // self.units_below(level))

    @property
    def crossed(self) -> tuple[int, ...]:
        """Levels the group crosses, innermost first."""
        return tuple(level for level in range(len(self.units)) if self.units_below(level) > self.units[level])


def place(group: Group | Sequence[int] | int | None, topology: Topology) -> Placement:
    """Placement of a group: a `Group`, a size (neighbouring ranks), a list of ranks (any flattened group), None for all.

    A group whose size or stride does not divide a level's size is placed as its worst copy lies.

    Raises:
        InputError: ranks out of range or repeated, or more of them than devices.
    """
    if group is None:
        group = Group(topology.world)
    if isinstance(group, int):
        group = Group(positive_int("group", group))
    if isinstance(group, Group):
        if group.size * group.stride > topology.world:
            raise InputError("group", group, f"ranks below {topology.world}")
        if all(level.counts is None for level in topology.levels):
            return _regular(group, tuple(level.size for level in topology.levels))
        return _worst(group, tuple(level.counts or (level.size,) for level in topology.levels), topology.world)
    return _listed(group, topology)


@lru_cache(maxsize=65536)
def _regular(group: Group, sizes: tuple[int, ...]) -> Placement:
    units, capacity = [], 1
    for index, size in enumerate(sizes):
        capacity *= size
        touched = 1 if index + 1 == len(sizes) else _units(group, capacity)
        units.append(min(touched, units[-1] if units else group.size))
    return Placement(group.size, tuple(units))


def _units(group: Group, capacity: int) -> int:
    span = group.size * group.stride
    if group.size == 1:
        return 1
    if group.stride >= capacity:
        return group.size
    if capacity % span == 0:
        return 1
    if capacity % group.stride == 0 and span % capacity == 0:
        return span // capacity
    return ceil(span / capacity) + 1


@lru_cache(maxsize=4096)
def _worst(group: Group, members: tuple[tuple[int, ...], ...], world: int) -> Placement:
    """Ragged levels: the most units of each level that any copy of the group touches. `members`: each level's counts, or size."""
    units, unit = [], list(range(world))
    span = group.size * group.stride
    starts = [block + offset for block in range(0, world - span + 1, span) for offset in range(group.stride)]
    for counts in members:
        unit = _outside(unit, counts)
        units.append(max(len(set(unit[start : start + span : group.stride])) for start in starts))
    units[-1] = 1
    return Placement(group.size, tuple(units))


def _outside(unit: Sequence[int], counts: tuple[int, ...]) -> list[int]:
    """For members of a level, the group of it that each is in; a single count holds for all groups."""
    if len(counts) == 1:
        return [member // counts[0] for member in unit]
    starts = list(accumulate(counts))
    return [bisect_right(starts, member) for member in unit]


def _listed(ranks: Sequence[int], topology: Topology) -> Placement:
    if not ranks or len(set(ranks)) != len(ranks) or min(ranks) < 0 or max(ranks) >= topology.world:
        raise InputError("group", list(ranks), f"different ranks from 0 to {topology.world - 1}")
    unit, units = list(ranks), []
    for level in topology.levels:
        unit = _outside(unit, level.counts or (level.size,))
        units.append(len(set(unit)))
    units[-1] = 1
    return Placement(len(ranks), tuple(units))
