"""Who can run something: ranks, the levels between them, and the places made of them. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from laneway.core import InputError, choice

__all__ = ["Members", "Place"]


@dataclass(frozen=True)
class Place:
    """Where a task can run, and in which way.

    Attributes:
        name: among the places of its task.
        ranks: those that run it, all of them together.
        variant: what tells it from another place with the same ranks, such as how gradients are reduced; empty: nothing.
    """

    name: str
    ranks: tuple[int, ...]
    variant: str = ""


class Members:
    """Ranks and the levels that they reach each other through.

    Args:
        positions: of rank 0, 1, …: outermost first, (rack, host). Ranks with the same position share a host. () for all ranks: a
            single level.
        names: of the levels, innermost first; by default L1 (inside a host), L2, …

    Raises:
        InputError: no rank, positions of different lengths, or another number of names.
    """

    def __init__(self, positions: Sequence[Sequence[int | str]], names: Sequence[str] = ()) -> None:
        self.positions = tuple(tuple(position) for position in positions)
        if not self.positions or len({len(position) for position in self.positions}) != 1:
            raise InputError("positions", list(positions)[:8], "one position a rank, all of one length: (rack, host)")
        self.depth = len(self.positions[0])
        self.names = tuple(names) or tuple(f"L{level + 1}" for level in range(self.depth + 1))
        if len(set(self.names)) != self.depth + 1:
            raise InputError("names", tuple(names), f"{self.depth + 1} different names, the innermost level's first")

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.positions)

    def level(self, name: str) -> int:
        """The index of a level, 0 innermost; raises InputError where there is none of that name."""
        return self.names.index(choice("level", name, self.names))

    def between(self, rank: int, other: int) -> int:
        """The index of the level over which two ranks reach each other; -1 for a rank and itself."""
        if rank == other:
            return -1
        a, b = self.positions[rank], self.positions[other]
        return self.depth - next((at for at in range(self.depth) if a[at] != b[at]), self.depth)

    def span(self, ranks: Sequence[int]) -> int:
        """The index of the outermost level that the ranks reach over; -1 for a single one."""
        return max((self.between(ranks[0], rank) for rank in ranks[1:]), default=-1)

    def group(self, level: str, rank: int) -> tuple[int, ...]:
        """The ranks that a rank reaches without going beyond a level, itself included."""
        index = self.level(level)
        return tuple(other for other in range(self.world) if self.between(rank, other) <= index)

    def ones(self, level: str = "") -> tuple[Place, ...]:
        """One rank for each member of a level: the first of each. Members of the innermost level (the default) are ranks."""
        index = self.level(level) if level else 0
        firsts = dict.fromkeys(min(self._inside(rank, index - 1)) for rank in range(self.world))
        return tuple(Place(f"rank {rank}", (rank,)) for rank in firsts)

    def groups(self, level: str) -> tuple[Place, ...]:
        """Each group of a level, whole: its ranks run the task together."""
        index = self.level(level)
        found = dict.fromkeys(self._inside(rank, index) for rank in range(self.world))
        return tuple(Place(f"{level} of rank {ranks[0]}", ranks) for ranks in found)

    def everyone(self, *variants: str) -> tuple[Place, ...]:
        """All ranks together, in each of the ways that are named."""
        return tuple(Place(variant, tuple(range(self.world)), variant) for variant in variants)

    def _inside(self, rank: int, index: int) -> tuple[int, ...]:
        return tuple(other for other in range(self.world) if self.between(rank, other) <= index)
