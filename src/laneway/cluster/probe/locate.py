"""Which link is slow, from which transfers were slow and which were not. No torch here.

A transfer between two ranks passes links: a rank's own way, its host's, its rack's uplink, as far out as the two are apart. A
link that a normal transfer passed is well. Of the others, as few as explain all slow transfers are named.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from laneway.cluster.reduce.places import Places

__all__ = ["Finding", "Link", "Tree", "locate"]

KINDS = {1: "host", 2: "rack"}


@dataclass(frozen=True, order=True)
class Link:
    """The way by which some ranks reach those outside.

    Attributes:
        level: innermost level that is reached over it: 0 for a rank's way to the others of its host.
        ranks: behind it: one rank, those of a host, of a rack, …
        own: a rank's own part of the way, where others of its host have theirs.
    """

    level: int
    ranks: tuple[int, ...]
    own: bool = False

    @property
    def kind(self) -> str:
        """rank, host, rack, or "member" further out."""
        return "rank" if self.own else KINDS.get(self.level, "member")

    def __str__(self) -> str:
        if self.own:
            return f"rank {self.ranks[0]} {'outside' if self.level else 'inside'} its host"
        return f"{self.kind} of {'rank' if len(self.ranks) == 1 else 'ranks'} {_runs(self.ranks)}"


@dataclass(frozen=True)
class Finding:
    """A slow link.

    Attributes:
        link: the one.
        also: others that the same transfers passed: one of them all it is.
        slow: how many slow transfers it explains.
    """

    link: Link
    also: tuple[Link, ...] = ()
    slow: int = 1

    def __str__(self) -> str:
        return " or ".join(map(str, (self.link, *self.also)))


@dataclass(frozen=True)
class Tree:
    """Who shares a host, a rack, …: the ranks of the whole that each rank is in, level by level.

    Attributes:
        places: of the groups.
    """

    places: Places
    _cache: dict[tuple[int, ...], frozenset[Link]] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def wholes(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """By level: hosts, racks, …, each as its ranks, in topological order."""
        found: list[tuple[tuple[int, ...], ...]] = []
        at: dict[int, tuple[int, ...]] = {rank: (rank,) for rank in self.places.order}
        seat = {rank: index for index, rank in enumerate(self.places.order)}
        for groups in self.places.groups:
            for group in groups:
                joined = tuple(sorted({rank for one in group for rank in at[one]}, key=seat.__getitem__))
                at.update(dict.fromkeys(joined, joined))
            found.append(tuple(dict.fromkeys(at[rank] for rank in self.places.order)))
        return tuple(found)

    @cached_property
    def _of_rank(self) -> dict[int, tuple[tuple[int, ...], ...]]:
        at: dict[int, list[tuple[int, ...]]] = {rank: [] for rank in self.places.order}
        for wholes in self.wholes:
            for whole in wholes:
                for rank in whole:
                    at[rank].append(whole)
        return {rank: tuple(found) for rank, found in at.items()}

    def level(self, ranks: Iterable[int]) -> int:
        """How far apart ranks are: the innermost level whose whole has them all."""
        one, *others = ranks
        return next(level for level, whole in enumerate(self._of_rank[one]) if all(rank in whole for rank in others))

    def links(self, ranks: Sequence[int]) -> frozenset[Link]:
        """What a transfer among these ranks passes."""
        key = tuple(sorted(ranks))
        if key not in self._cache:
            level = self.level(key)
            self._cache[key] = frozenset(link for rank in key for link in self._ways(rank, level))
        return self._cache[key]

    def _ways(self, rank: int, level: int) -> list[Link]:
        if level == 0:
            return [Link(0, (rank,), True)]
        wholes = self._of_rank[rank]
        own = [Link(1, (rank,), True)] if len(wholes[0]) > 1 else []
        return own + [Link(at, wholes[at - 1]) for at in range(1, level + 1)]


def locate(tree: Tree, slow: Iterable[Sequence[int]], normal: Iterable[Sequence[int]]) -> list[Finding]:
    """The links that explain what was slow.

    Args:
        tree: of all ranks.
        slow: the ranks of each slow transfer.
        normal: and of those that were not.

    Returns: most slow transfers explained first. A transfer that every link's normal transfers speak against stays unexplained.
    """
    well = frozenset(link for ranks in normal for link in tree.links(ranks))
    left = {tuple(sorted(ranks)): tree.links(ranks) - well for ranks in slow}
    found: list[Finding] = []
    while any(left.values()):
        passed: dict[Link, set[tuple[int, ...]]] = {}
        for ranks, links in left.items():
            for link in links:
                passed.setdefault(link, set()).add(ranks)
        best = min(passed, key=lambda link: (-len(passed[link]), link.own, link))
        also = tuple(sorted(link for link in passed if link != best and passed[link] == passed[best]))
        found.append(Finding(best, also, len(passed[best])))
        left = {ranks: links for ranks, links in left.items() if ranks not in passed[best]}
    return found


def _runs(ranks: Sequence[int]) -> str:
    """1, 2, 3, 7 as 1-3, 7."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
