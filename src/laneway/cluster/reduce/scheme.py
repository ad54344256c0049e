"""How a reduction goes over the levels: per level an algorithm, a format on the wire and a share that is left out.

No torch here: the planner makes schemes, the probe changes them, a run writes them into its events.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import Any

from laneway.core import InputError, choice, positive_int

__all__ = ["ALGORITHMS", "FLAT", "WIRES", "LevelScheme", "ReductionScheme", "SchemeTable", "schemes_of"]

ALGORITHMS = ("native", "ring", "tree", "all_to_all", "torus")
"""Within one level: the backend's own collective, a ring, a tree, an exchange with every member and a local sum, or rings along
the x, y and z of a torus."""
WIRES = ("fp32", "bf16", "int8")
"""What travels; sums are in fp32 whatever travels. int8: blocks with one fp32 scale each."""
LEAST_CHUNK = 1024


@dataclass(frozen=True)
class LevelScheme:
    """One level's part.

    Attributes:
        algorithm: one of `ALGORITHMS`.
        wire: one of `WIRES`.
        dims: sizes of the torus, x first; they multiply to the level's members. Empty for the other algorithms.
        drop: share of the gradient's entries that stay at home in a step, fed back in later ones; 0 sends all. Only the outermost
            level may drop.

    Raises:
        InputError: a value out of range.
    """

    algorithm: str = "all_to_all"
    wire: str = "fp32"
    dims: tuple[int, ...] = ()
    drop: float = 0.0

    def __post_init__(self) -> None:
        choice("algorithm", self.algorithm, ALGORITHMS)
        choice("wire", self.wire, WIRES)
        object.__setattr__(self, "dims", tuple(self.dims))
        for size in self.dims:
            positive_int("dims", size)
        if bool(self.dims) != (self.algorithm == "torus"):
            raise InputError("dims", self.dims, "the sizes of a torus, and none for other algorithms")
        if isinstance(self.drop, bool) or not isinstance(self.drop, int | float) or not 0 <= self.drop < 1:
            raise InputError("drop", self.drop, "a share from 0 to below 1")


@dataclass(frozen=True)
class ReductionScheme:
    """A whole reduction.

    Attributes:
        levels: innermost first, one for each level of the groups; none: one flat native collective over all ranks.
        chunk_bytes: pieces of the vector that follow each other through the levels, each on another one; 0: no pieces.

    Raises:
        InputError: a value out of range, or an inner level that drops.
    """

    levels: tuple[LevelScheme, ...] = ()
    chunk_bytes: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "levels", tuple(self.levels))
        if self.chunk_bytes != 0:
            positive_int("chunk_bytes", self.chunk_bytes, LEAST_CHUNK)
        if any(level.drop for level in self.levels[:-1]):
            raise InputError("drop", [level.drop for level in self.levels], "0 but for the outermost level")

    @property
    def flat(self) -> bool:
        """Whether this is one collective over all ranks."""
        return not self.levels

    def __str__(self) -> str:
        if self.flat:
            return "flat"
        parts = []
        for level in self.levels:
            name = level.algorithm + ("(" + "x".join(map(str, level.dims)) + ")" if level.dims else "")
            parts.append(f"{name}:{level.wire}" + (f"-{level.drop:g}" if level.drop else ""))
        return " > ".join(parts) + (f" / {self.chunk_bytes}" if self.chunk_bytes else "")

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self) | {"levels": [asdict(level) | {"dims": list(level.dims)} for level in self.levels]}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> ReductionScheme:
        """Undo of `to_dict`.

        Raises:
            InputError: no mapping, an unknown name, or a value out of range.
        """
        found = _known("scheme", given, cls)
        levels = found.get("levels", ())
        if not isinstance(levels, list | tuple):
            raise InputError("scheme.levels", levels, "a list, one entry a level")
        return cls(
            tuple(LevelScheme(**_known("scheme.levels", level, LevelScheme)) for level in levels), found.get("chunk_bytes", 0)
        )


FLAT = ReductionScheme()


@dataclass(frozen=True)
class SchemeTable:
    """A scheme for each size of vector: small ones go flat, where a hierarchy only adds steps.

    Attributes:
        rows: (bytes, scheme), ascending and from 0: the scheme of vectors of so many bytes and more.

    Raises:
        InputError: no row, or bounds that don't begin at 0 and ascend.
    """

    rows: tuple[tuple[int, ReductionScheme], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", tuple((bound, scheme) for bound, scheme in self.rows))
        bounds = [bound for bound, _ in self.rows]
        if not bounds or bounds[0] != 0 or any(low >= high for low, high in pairwise(bounds)):
            raise InputError("rows", bounds, "bytes from which on each scheme is used, ascending and from 0")
        for _, scheme in self.rows:
            if not isinstance(scheme, ReductionScheme):
                raise InputError("rows", scheme, "a ReductionScheme for each bound")

    def at(self, nbytes: int) -> ReductionScheme:
        """The scheme of a vector of that size."""
        return next(scheme for bound, scheme in reversed(self.rows) if nbytes >= bound)

    def __str__(self) -> str:
        return "; ".join(f"from {bound}: {scheme}" for bound, scheme in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {"rows": [[bound, scheme.to_dict()] for bound, scheme in self.rows]}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> SchemeTable:
        """Undo of `to_dict`.

        Raises:
            InputError: no such mapping, or a value out of range.
        """
        rows = _known("table", given, cls).get("rows")
        if not isinstance(rows, list | tuple) or any(not isinstance(row, list | tuple) or len(row) != 2 for row in rows):
            raise InputError("table.rows", rows, "a list of [bytes, scheme]")
        return cls(tuple((positive_int("table.rows", bound, 0), ReductionScheme.from_dict(scheme)) for bound, scheme in rows))


def schemes_of(given: ReductionScheme | SchemeTable) -> tuple[ReductionScheme, ...]:
    """The scheme, or those of a table."""
    return tuple(scheme for _, scheme in given.rows) if isinstance(given, SchemeTable) else (given,)


def _known(where: str, given: Any, kind: type) -> dict[str, Any]:
    names = [field.name for field in fields(kind)]
    if not isinstance(given, Mapping):
        raise InputError(where, given, "names with values: " + ", ".join(names))
    for name in given:
        choice(where, name, names)
    return dict(given)
