"""A scheme laid over one rank's groups: its legs up and down, and which part of a vector lies where."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from laneway.cluster.reduce.exchange import Link
from laneway.cluster.reduce.groups import LevelGroups
from laneway.cluster.reduce.legs import Leg
from laneway.cluster.reduce.places import Places
from laneway.cluster.reduce.rounds import bounds_of
from laneway.cluster.reduce.scheme import LevelScheme, ReductionScheme

__all__ = ["Links", "Plan", "Way"]


class Links:
    """This rank's ends of all its groups, made once; their workspaces live as long."""

    def __init__(self, groups: LevelGroups) -> None:
        self.up = [_link(group, ranks, groups.rank) for group, ranks in zip(groups.up, groups.ranks, strict=True)]
        self.down = [_link(group, ranks, groups.rank) for group, ranks in zip(groups.down, groups.ranks, strict=True)]

    def sent(self) -> list[int]:
        """Bytes that this rank sent, by level."""
        return [sum(link.sent for link in pair if link is not None) for pair in zip(self.up, self.down, strict=True)]


def _link(group: object, ranks: tuple[int, ...], rank: int) -> Link | None:
    return Link(group, ranks, rank) if group is not None else None  # type: ignore[arg-type]


@dataclass(frozen=True)
class Plan:
    """A scheme's legs on this rank.

    Attributes:
        scheme: the scheme.
        up, down: by level; None where nothing joins this rank there. The last of `up` is the turn, and the last of `down` isn't
            used: the turn comes back the way it went.
        first: the innermost level that joins ranks anywhere: further out everything is in the sum's type, on every rank.
        order: the rank whose part of a reduce-scatter or all-gather stands first, second, … in the packed vector; empty where
            groups are ragged.
        staged: inner levels at which this rank has a group, and so a stage of the pipeline.
    """

    scheme: ReductionScheme
    up: tuple[Leg | None, ...]
    down: tuple[Leg | None, ...]
    first: int
    order: tuple[int, ...]
    staged: tuple[int, ...]

    @classmethod
    def make(cls, scheme: ReductionScheme, places: Places, links: Links) -> Plan:
        """The legs of a scheme."""
        up = tuple(map(_leg, links.up, scheme.levels, places.widths))
        down = tuple(map(_leg, links.down, scheme.levels, places.widths))
        staged = tuple(level for level, leg in enumerate(up[:-1]) if leg is not None)
        return cls(scheme, up, down, _first(places, 0), _packed_order(scheme, places), staged)

    def from_level(self, level: int, places: Places) -> Plan:
        """The same without the levels inside that one: ranks that act for different members of it reduce with their like."""
        nobody = (None,) * level
        return replace(self, up=nobody + self.up[level:], down=nobody + self.down[level:], first=_first(places, level))

    def for_parts(self, *, exact: bool) -> Plan:
        """The same for reduce-scatter and all-gather: a tree has no parts to share out, so that members exchange directly
        instead; `exact`: everything travels as it is.
        """
        levels = []
        for level in self.scheme.levels:
            algorithm = "all_to_all" if level.algorithm == "tree" else level.algorithm
            levels.append(replace(level, algorithm=algorithm, wire="fp32" if exact else level.wire, drop=0.0))
        up = tuple(leg and replace(leg, scheme=level) for leg, level in zip(self.up, levels, strict=True))
        down = tuple(leg and replace(leg, scheme=level) for leg, level in zip(self.down, levels, strict=True))
        return replace(self, scheme=replace(self.scheme, levels=tuple(levels)), up=up, down=down)


def _first(places: Places, level: int) -> int:
    """The innermost level, from that one outwards, that joins ranks anywhere."""
    return next((each for each in range(level, len(places.sizes)) if places.sizes[each] > 1), level)


def _leg(link: Link | None, scheme: LevelScheme, width: int) -> Leg | None:
    return Leg(link, scheme, width) if link is not None else None


def _packed_order(scheme: ReductionScheme, places: Places) -> tuple[int, ...]:
    """The rank that ends up with the first, second, … of as many equal parts as there are ranks."""
    if places.ragged:
        return ()
    return _order_of(tuple(level.dims for level in scheme.levels), places)


@lru_cache(maxsize=16)
def _order_of(tori: tuple[tuple[int, ...], ...], places: Places) -> tuple[int, ...]:
    """Only a torus shares out in another order than that of its members."""
    world = len(places.order)
    order = [0] * world
    for rank in range(world):
        start, stop = 0, world
        for dims, group in zip(tori, places.of_rank(rank), strict=True):
            algorithm = "torus" if dims else "all_to_all"
            first, last = bounds_of(algorithm, dims, stop - start, len(group), len(group))[group.index(rank)]
            start, stop = start + first, start + last
        order[start] = rank
    return tuple(order)


@dataclass(frozen=True)
class Way:
    """A scheme with its plans on this rank; a flat one has none.

    Attributes:
        scheme: the scheme.
        reducing, scattering, gathering: of an all-reduce, a reduce-scatter and an all-gather.
    """

    scheme: ReductionScheme
    reducing: Plan | None = None
    scattering: Plan | None = None
    gathering: Plan | None = None

    @classmethod
    def make(cls, scheme: ReductionScheme, places: Places, links: Links) -> Way:
        """All plans of a scheme."""
        if scheme.flat:
            return cls(scheme)
        plan = Plan.make(scheme, places, links)
        return cls(scheme, plan, plan.for_parts(exact=False), plan.for_parts(exact=True))
