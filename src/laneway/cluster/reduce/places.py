"""Who reduces with whom at each level, worked out from where each rank sits. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from laneway.core import InputError

__all__ = ["Places", "find_places", "split"]

Path = tuple[int | str, ...]


@dataclass(frozen=True)
class Places:
    """The groups of every level, innermost first.

    Within a host, members share the vector out among them; the members that own the same share in each host of a rack form a
    group of the next level, and so on. Where groups of a level differ in size (ragged), as many members own a share as the
    smallest group has: the others add theirs to it, own nothing and have no group further out.

    Attributes:
        groups: `groups[level]`, the ranks of each group of that level, in order.
        sizes: members of the largest group of each level.
        widths: members that own a share, in each group of a level.
        order: ranks in topological order, in which a ring over all of them crosses each slow link as rarely as it can.
    """

    groups: tuple[tuple[tuple[int, ...], ...], ...]
    sizes: tuple[int, ...]
    widths: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def ragged(self) -> bool:
        """Whether some level has groups of different sizes."""
        return any(len(group) != size for groups, size in zip(self.groups, self.sizes, strict=True) for group in groups)

    @cached_property
    def _own(self) -> dict[int, list[tuple[int, ...]]]:
        own: dict[int, list[tuple[int, ...]]] = {rank: [()] * len(self.groups) for rank in self.order}
        for level, groups in enumerate(self.groups):
            for group in groups:
                for rank in group:
                    own[rank][level] = group
        return own

    def of_rank(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """The rank's own group at each level; empty where it has none."""
        return tuple(self._own[rank])


def find_places(positions: Sequence[Sequence[int | str]]) -> Places:
    """Groups from positions.

    Args:
        positions: of rank 0, 1, …: outermost first, (rack, host). Ranks with the same position share a host, in the order of
            their numbers. Hosts and racks come in the order of their positions. () for all ranks: a single level.

    Raises:
        InputError: no rank; positions of different lengths; one place written as a number here and as text there.
    """
    paths = [tuple(position) for position in positions]
    if not paths or len({len(path) for path in paths}) != 1:
        raise InputError("positions", list(positions)[:8], "one position a rank, all of one length: (rack, host)")
    depth = len(paths[0]) + 1
    acting: dict[Path, list[int]] = {}
    for rank, path in enumerate(paths):
        acting.setdefault(path, []).append(rank)
    try:
        acting = dict(sorted(acting.items()))
    except TypeError:
        raise InputError("positions", list(positions)[:8], "numbers throughout, or text throughout") from None
    order = tuple(rank for ranks in acting.values() for rank in ranks)
    members = [[[rank] for rank in ranks] for ranks in acting.values()]
    domains: list[Path] = list(acting)
    acts = list(acting.values())
    groups, sizes, widths = [], [], []
    for level in range(depth):
        if level:
            domains, members = _joined(domains, acts)
        counts = [len(domain) for domain in members]
        sizes.append(max(counts))
        widths.append(min(counts))
        groups.append(tuple(tuple(column) for domain in members for column in zip(*domain, strict=True)))
        acts = [[rank for child in domain[: widths[-1]] for rank in child] for domain in members]
    return Places(tuple(groups), tuple(sizes), tuple(widths), order)


def _joined(domains: list[Path], acting: list[list[int]]) -> tuple[list[Path], list[list[list[int]]]]:
    """The domains one level further out, each with the ranks that act for its members."""
    joined: dict[Path, list[list[int]]] = {}
    for path, ranks in zip(domains, acting, strict=True):
        joined.setdefault(path[:-1], []).append(ranks)
    return list(joined), list(joined.values())


def split(length: int, parts: int, width: int | None = None) -> list[tuple[int, int]]:
    """Bounds of `parts` consecutive parts, the first `width` of them as equal as can be and the others empty."""
    width = parts if width is None else width
    each, more = divmod(length, width)
    ends = [0]
    for part in range(parts):
        ends.append(ends[-1] + ((each + (part < more)) if part < width else 0))
    return list(pairwise(ends))
