"""The rounds of messages of each algorithm within one level, on numbers that travel as they are.

`scatter_*` leave in a member's own part of `numbers` the sum of that part over the members; `gather_*` bring every member's part
to all. `bounds` holds each member's part: (start, stop), consecutive but for a torus, some of them empty.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from laneway.cluster.reduce.exchange import Link
from laneway.cluster.reduce.places import split

__all__ = ["Bounds", "bounds_of", "gather", "gather_rounds", "scatter_rounds", "tree_reduce", "tree_spread"]

Bounds = list[tuple[int, int]]


def bounds_of(algorithm: str, dims: Sequence[int], length: int, size: int, width: int) -> Bounds:
    """Each member's part of a vector: equal ones for the first `width` members; all of it for the first, where sums go up a tree;
    parts of parts for a torus, along x first.
    """
    if algorithm == "tree":
        return split(length, size, 1)
    if algorithm != "torus":
        return split(length, size, width)
    bounds: Bounds = [(0, length)] * size
    for axis in range(len(dims)):
        stride = math.prod(dims[:axis])
        for member in range(size):
            start, stop = bounds[member]
            first, last = split(stop - start, dims[axis])[member // stride % dims[axis]]
            bounds[member] = (start + first, start + last)
    return bounds


def scatter_rounds(link: Link, numbers: Tensor, bounds: Bounds, dims: Sequence[int]) -> None:
    """Along one ring, or along a torus' rings one axis after the other. The sum stays in `numbers`' own part."""
    for axis in range(len(dims)):
        peers, parts = _ring(link, bounds, dims, axis)
        _ring_scatter(link, numbers, peers, parts)


def gather_rounds(link: Link, numbers: Tensor, bounds: Bounds, dims: Sequence[int]) -> None:
    """The way back of `scatter_rounds`."""
    for axis in reversed(range(len(dims))):
        peers, parts = _ring(link, bounds, dims, axis)
        _ring_gather(link, numbers, peers, parts)


def gather(link: Link, numbers: Tensor, bounds: Bounds) -> None:
    """Every member sends its part to each other member."""
    start, stop = bounds[link.index]
    own = numbers[start:stop]
    peers = link.peers()
    link.exchange([(peer, own) for peer in peers], [(peer, numbers[slice(*bounds[peer])]) for peer in reversed(peers)])


def tree_reduce(link: Link, numbers: Tensor) -> None:
    """A binomial tree to the first member, which gets the sum; the others' numbers are spoilt."""
    step = 1
    while step < link.size:
        if link.index & step:
            link.exchange([(link.index - step, numbers)], [])
            return
        if link.index + step < link.size:
            theirs = link.scratch.get("tree", numbers.numel(), numbers.dtype, numbers.device)
            link.exchange([], [(link.index + step, theirs)])
            numbers.add_(theirs)
        step *= 2


def tree_spread(link: Link, numbers: Tensor) -> None:
    """The first member's numbers to all, down the same tree."""
    step = 1
    while step < link.size:
        step *= 2
    while step > 1:
        half = step // 2
        if link.index % step == 0 and link.index + half < link.size:
            link.exchange([(link.index + half, numbers)], [])
        elif link.index % step == half:
            link.exchange([], [(link.index - half, numbers)])
        step = half


def _ring(link: Link, bounds: Bounds, dims: Sequence[int], axis: int) -> tuple[list[int], Bounds]:
    """The members of this rank's ring along an axis, itself first, and what each of them has after that axis: the span of all
    members that differ from it along later axes alone.
    """
    stride, count = math.prod(dims[:axis]), dims[axis]
    place = link.index // stride % count
    inner = link.index % stride
    peers, parts = [], []
    for step in range(count):
        there = (place + step) % count
        peers.append(link.index + (there - place) * stride)
        span = [bounds[inner + there * stride + later] for later in range(0, len(bounds), stride * count)]
        parts.append((min(start for start, _ in span), max(stop for _, stop in span)))
    return peers, parts


def _ring_scatter(link: Link, numbers: Tensor, peers: list[int], parts: Bounds) -> None:
    """`peers` and `parts` begin with this rank's own."""
    count = len(peers)
    if count == 1:
        return
    longest = max(stop - start for start, stop in parts)
    space = link.scratch.get("ring", longest, numbers.dtype, numbers.device)
    for step in range(count - 1):
        sent, got = parts[-1 - step], parts[(-2 - step) % count]
        theirs = space[: got[1] - got[0]]
        link.exchange([(peers[1], numbers[slice(*sent)])], [(peers[-1], theirs)])
        numbers[slice(*got)].add_(theirs)


def _ring_gather(link: Link, numbers: Tensor, peers: list[int], parts: Bounds) -> None:
    count = len(peers)
    for step in range(count - 1):
        sent, got = parts[-step % count], parts[-1 - step]
        link.exchange([(peers[1], numbers[slice(*sent)])], [(peers[-1], numbers[slice(*got)])])
