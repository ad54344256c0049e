"""One level's way up (sums, shared out), way down (parts back to all) and turn (both, at the outermost level)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from laneway.cluster.reduce.exchange import Link
from laneway.cluster.reduce.rounds import (
    Bounds,
    bounds_of,
    gather,
    gather_rounds,
    scatter_rounds,
    tree_reduce,
    tree_spread,
)
from laneway.cluster.reduce.scheme import LevelScheme
from laneway.cluster.reduce.wire import Codec, codec_for

__all__ = ["Leg"]

DIRECT = ("all_to_all", "native")


@dataclass(frozen=True)
class Leg:
    """One level in one direction.

    Where members exchange with each other directly (all_to_all, native), what they send travels on the level's wire, rounded
    once, and the owner of a part sums what arrives in pairs. Along a ring, a torus or a tree partial sums travel; rounded at
    every hop, their error would grow with the members, so that they travel as they are and only what comes back is on the wire.

    Args:
        link: this rank's end of the group.
        scheme: the level's part of the reduction.
        width: members that own a part.
    """

    link: Link
    scheme: LevelScheme
    width: int

    @property
    def direct(self) -> bool:
        """Whether members exchange directly; then numbers of any type may be summed, else only those of the sum's type."""
        return self.scheme.algorithm in DIRECT

    @property
    def dims(self) -> tuple[int, ...]:
        """Rings along which messages go: one of all members, or those of the torus."""
        return self.scheme.dims or (self.link.size,)

    def bounds(self, length: int) -> Bounds:
        """Each member's part."""
        return bounds_of(self.scheme.algorithm, self.scheme.dims, length, self.link.size, self.width)

    def scatter(self, numbers: Tensor, own: Tensor, bounds: Bounds) -> None:
        """Sum this rank's part of `numbers` over the members into `own`, which may be that very part or another buffer of the
        sum's type. The rest of `numbers` is spoilt.
        """
        if self.scheme.algorithm == "tree":
            tree_reduce(self.link, numbers)
        elif not self.direct:
            scatter_rounds(self.link, numbers, bounds, self.dims)
        else:
            codec = codec_for(self.scheme.wire, numbers.dtype)
            native = self.scheme.algorithm == "native"
            if native and codec is None and self.link.native_scatter(numbers, own):
                return
            mine = numbers[slice(*bounds[self.link.index])]
            if own.data_ptr() != mine.data_ptr():
                own.copy_(mine)
            rows = self._arrived(numbers, bounds, codec, native)
            _add_all(own, rows, codec, self.link)

    def gather(self, numbers: Tensor, bounds: Bounds) -> None:
        """Bring every member's part of `numbers` to all; on a narrow wire a member's own part is rounded too."""
        codec = codec_for(self.scheme.wire, numbers.dtype)
        if codec is None:
            self._spread(numbers, bounds)
            return
        parts = self._message_bounds(bounds, codec)
        space = self.link.scratch.get("messages", max(stop for _, stop in parts), codec.dtype, numbers.device)
        mine = numbers[slice(*bounds[self.link.index])]
        if mine.numel():
            codec.encode(mine, space[slice(*parts[self.link.index])])
        self._spread(space, parts)
        for (start, stop), part in zip(bounds, parts, strict=True):
            if stop > start:
                codec.decode(space[slice(*part)], numbers[start:stop])

    def swap(self, numbers: Tensor, own: Tensor) -> None:
        """Of two members: exchange everything and sum it on both, in one round with as many bytes as scatter and gather.

        `own` gets the sum; it may be `numbers` itself or a buffer of the sum's type. What is sent is rounded on both sides.
        """
        codec, device = codec_for(self.scheme.wire, numbers.dtype), numbers.device
        other = 1 - self.link.index
        if codec is None:
            theirs = self.link.scratch.get("swap", numbers.numel(), numbers.dtype, device)
            self.link.exchange([(other, numbers)], [(other, theirs)])
            if own.data_ptr() != numbers.data_ptr():
                own.copy_(numbers)
            own.add_(theirs)
            return
        length = codec.length(numbers.numel())
        mine = self.link.scratch.get("mine", length, codec.dtype, device)
        theirs = self.link.scratch.get("theirs", length, codec.dtype, device)
        codec.encode(numbers, mine)
        self.link.exchange([(other, mine)], [(other, theirs)])
        codec.decode(mine, own)
        _add_one(own, theirs, codec, self.link)

    def _spread(self, space: Tensor, parts: Bounds) -> None:
        """Each member's part of `space` to all, as it is."""
        link = self.link
        if self.scheme.algorithm == "tree":
            tree_spread(link, space)
        elif not self.direct:
            gather_rounds(link, space, parts, self.dims)
        elif self.scheme.algorithm == "native" and len({stop - start for start, stop in parts}) == 1:
            link.native_gather(space, space[slice(*parts[link.index])])
        else:
            gather(link, space, parts)

    def _message_bounds(self, bounds: Bounds, codec: Codec) -> Bounds:
        """Where each part's message lies: in the order of the parts."""
        parts, end = [(0, 0)] * len(bounds), 0
        for member in sorted(range(len(bounds)), key=lambda member: (bounds[member], member)):
            start, stop = bounds[member]
            parts[member] = (end, end + codec.length(stop - start))
            end = parts[member][1]
        return parts

    def _arrived(self, numbers: Tensor, bounds: Bounds, codec: Codec | None, native: bool) -> list[Tensor]:
        """What the other members hold of this rank's part, as it travelled."""
        link, scratch, device = self.link, self.link.scratch, numbers.device
        parts, out = bounds, numbers
        if codec is not None:
            parts = self._message_bounds(bounds, codec)
            out = scratch.get("out", parts[-1][1], codec.dtype, device)
            for peer in link.peers():
                if bounds[peer][1] > bounds[peer][0]:
                    codec.encode(numbers[slice(*bounds[peer])], out[slice(*parts[peer])])
        length = parts[link.index][1] - parts[link.index][0]
        into = scratch.get("into", length * link.size, out.dtype, device)
        rows = list(into.split(length)) if length else []
        if native:
            link.native_exchange(out, into, [stop - start for start, stop in parts], [length] * link.size)
        else:
            sends = [(peer, out[slice(*parts[peer])]) for peer in link.peers()]
            link.exchange(sends, [(peer, rows[peer]) for peer in reversed(link.peers())] if rows else [])
        return [row for peer, row in enumerate(rows) if peer != link.index]


def _add_all(own: Tensor, rows: list[Tensor], codec: Codec | None, link: Link) -> None:
    """Add what arrived, pair by pair: a number is rounded as often as the logarithm of the members."""
    if len(rows) == 1:
        _add_one(own, rows[0], codec, link)
        return
    if codec is not None or any(row.dtype != own.dtype for row in rows):
        wide = link.scratch.get("wide", own.numel() * len(rows), own.dtype, own.device).split(max(1, own.numel()))
        for row, numbers in zip(rows, wide, strict=False):
            numbers.copy_(row) if codec is None else codec.decode(row, numbers)
        rows = list(wide)[: len(rows)]
    rows = [own, *rows]
    while len(rows) > 1:
        half = (len(rows) + 1) // 2
        for left, right in zip(rows, rows[half:], strict=False):
            left.add_(right)
        rows = rows[:half]


def _add_one(own: Tensor, row: Tensor, codec: Codec | None, link: Link) -> None:
    if codec is None or codec.dtype == torch.bfloat16:
        own.add_(row)
        return
    numbers = link.scratch.get("wide", own.numel(), own.dtype, own.device)
    codec.decode(row, numbers)
    own.add_(numbers)
