"""Which entries of which parameters a flat vector of gradients holds. No torch here."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from laneway.core import InputError, positive_int

__all__ = ["PADDING", "Piece", "Pieces"]

PADDING = ""
"""Name of entries that belong to no parameter."""


@dataclass(frozen=True)
class Piece:
    """A run of a parameter's entries.

    Attributes:
        name: the parameter's; `PADDING` for entries of none.
        start: first entry, in the parameter flattened.
        stop: one past the last.
        numel: entries of the whole parameter.

    Raises:
        InputError: an empty run, or one that the parameter does not have.
    """

    name: str
    start: int
    stop: int
    numel: int

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise InputError("piece.name", self.name, "a parameter's name")
        positive_int("piece.start", self.start, 0)
        positive_int("piece.stop", self.stop, self.start + 1)
        positive_int("piece.numel", self.numel, self.stop)

    def __len__(self) -> int:
        return self.stop - self.start

    def cut(self, low: int, high: int) -> Piece:
        """Entries low to high of this run."""
        return Piece(self.name, self.start + low, self.start + high, self.numel)


@dataclass(frozen=True)
class Pieces:
    """What lies in a flat vector, from its first entry to its last; two are equal where they hold the same in the same order.

        bucket = Pieces.of({"layer.weight": 4096, "layer.bias": 64})
        bucket.shard(2048, 4160).pieces      # (Piece("layer.weight", 2048, 4096, 4096), Piece("layer.bias", 0, 64, 64))

    Attributes:
        pieces: one after the other, without gaps. Neighbours that continue each other are joined.

    Raises:
        InputError: something else than pieces.
    """

    pieces: tuple[Piece, ...] = ()

    def __post_init__(self) -> None:
        joined: list[Piece] = []
        for piece in self.pieces:
            if not isinstance(piece, Piece):
                raise InputError("pieces", piece, "a Piece for each run of entries")
            last = joined[-1] if joined else None
            if last is not None and (last.name, last.numel, last.stop) == (piece.name, piece.numel, piece.start):
                joined[-1] = Piece(piece.name, last.start, piece.stop, piece.numel)
            else:
                joined.append(piece)
        object.__setattr__(self, "pieces", tuple(joined))

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> Pieces:
        """Whole parameters one after the other, by name and number of entries; empty ones are left out."""
        return cls(tuple(Piece(name, 0, numel, numel) for name, numel in sizes.items() if numel))

    @property
    def numel(self) -> int:
        """Entries in all."""
        return self.starts[-1]

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where each piece begins in the vector, and last the vector's length."""
        return tuple(accumulate((len(piece) for piece in self.pieces), initial=0))

    @cached_property
    def _hash(self) -> int:
        return hash(self.pieces)

    def __hash__(self) -> int:  # keys of every collective call: not over all pieces each time
        return self._hash

    def __iter__(self) -> Iterator[tuple[int, Piece]]:
        """Each piece with the place where it begins."""
        return zip(self.starts, self.pieces, strict=False)

    def __add__(self, other: Pieces) -> Pieces:
        return Pieces(self.pieces + other.pieces)

    def shard(self, low: int, high: int) -> Pieces:
        """The entries low to high of the vector; those beyond its end are padding.

        Raises:
            InputError: low < 0 or high < low.
        """
        positive_int("low", low, 0)
        positive_int("high", high, low)
        found: list[Piece] = []
        first = max(0, bisect_right(self.starts, low) - 1)
        for start, piece in zip(self.starts[first:], self.pieces[first:], strict=False):
            if start >= high:
                break
            a, b = max(low - start, 0), min(high - start, len(piece))
            if a < b:
                found.append(piece.cut(a, b))
        beyond = max(low, self.numel)
        if beyond < high:
            found.append(Piece(PADDING, beyond - self.numel, high - self.numel, high - self.numel))
        return Pieces(tuple(found))
