"""What a step's batch looks like: shapes and dtypes, and nothing of its contents. No torch here."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from laneway.core import InputError, positive_int

Leaf = tuple[str, tuple[int, ...], str]


@dataclass(frozen=True)
class Signature:
    """Hashable description of a batch. Steps with equal signatures allocate the same bytes, as long as shapes decide alone."""

    leaves: tuple[Leaf, ...]
    """(place in the nest, shape, dtype without its library's name) of every array, mappings by sorted key."""
    batch: int
    """Sequences B."""
    length: int
    """Positions of one sequence, T."""
    tokens: int
    """B·T, or what the caller counted."""

    @classmethod
    def of(cls, batch: Any, tokens: int | None = None) -> Signature:
        """The signature of any nest (mappings, lists, tuples, dataclasses) of arrays or tensors with ``shape`` and ``dtype``.

        B and T are the sizes of the largest integer array with two dims; of a packed one with one dim, 1 and its size. Without
        either, the largest array of all counts: B is its first dim and T the product of the others, so that tokens are its
        elements. Everything that is no array is passed over.

        Args:
            batch: the batch.
            tokens: tokens of the step, where they are something else than B·T.

        Raises:
            InputError: no array in ``batch``, or ``tokens`` is no integer ≥ 1.
        """
        leaves = tuple(_leaves(batch, ""))
        if not leaves:
            raise InputError("batch", type(batch).__name__, "a nest with at least one array or tensor")
        sequences, length = _sizes(leaves)
        counted = sequences * length if tokens is None else positive_int("tokens", tokens)
        return cls(leaves, sequences, length, counted)

    def bucketed(self, multiple: int) -> Signature:
        """The same with T, wherever it stands in a shape, rounded up to a multiple of ``multiple``; tokens grow in proportion."""
        longer = -(-self.length // positive_int("multiple", multiple)) * multiple
        if longer == self.length:
            return self
        packed = self.batch == 1
        leaves = tuple((at, _stretched(shape, self.length, longer, packed), dtype) for at, shape, dtype in self.leaves)
        return Signature(leaves, self.batch, longer, -(-self.tokens * longer // max(1, self.length)))

    @property
    def pairs(self) -> int:
        """B·T², what attention that keeps its scores is proportional to."""
        return self.batch * self.length**2

    def as_json(self) -> list[Any]:
        """Plain JSON types; ``from_json`` undoes it."""
        return [[[at, list(shape), dtype] for at, shape, dtype in self.leaves], self.batch, self.length, self.tokens]

    @classmethod
    def from_json(cls, told: list[Any]) -> Signature:
        """Undo of ``as_json``."""
        leaves, batch, length, tokens = told
        return cls(tuple((at, tuple(shape), dtype) for at, shape, dtype in leaves), batch, length, tokens)


def _leaves(node: Any, at: str) -> Iterator[Leaf]:
    if hasattr(node, "shape") and hasattr(node, "dtype"):
        shape = node.values().shape if getattr(node, "is_nested", False) else node.shape  # ragged: what lies packed in memory
        yield at, tuple(int(size) for size in shape), str(node.dtype).rpartition(".")[2]
    elif isinstance(node, Mapping):
        for key in sorted(node, key=str):
            yield from _leaves(node[key], f"{at}.{key}")
    elif isinstance(node, list | tuple):
        for index, item in enumerate(node):
            yield from _leaves(item, f"{at}[{index}]")
    elif dataclasses.is_dataclass(node) and not isinstance(node, type):
        for item in dataclasses.fields(node):
            yield from _leaves(getattr(node, item.name), f"{at}.{item.name}")


def _sizes(leaves: tuple[Leaf, ...]) -> tuple[int, int]:
    """B and T; see ``Signature.of``."""
    integers = [shape for _, shape, dtype in leaves if dtype.startswith(("int", "uint"))]
    for dims in (2, 1):
        fitting = [shape for shape in integers if len(shape) == dims]
        if fitting:
            largest = max(fitting, key=math.prod)
            return (largest[0], largest[1]) if dims == 2 else (1, largest[0])
    largest = max((shape for _, shape, _ in leaves), key=math.prod)
    return (largest[0], math.prod(largest[1:])) if largest else (1, 1)


def _stretched(shape: tuple[int, ...], length: int, longer: int, packed: bool) -> tuple[int, ...]:
    """Every size that equals ``length`` becomes ``longer``; the first, which counts sequences, only in a packed single dim."""
    first = 0 if packed and len(shape) == 1 else 1
    return (*shape[:first], *(longer if size == length else size for size in shape[first:]))
