"""What a rank has not sent yet, by parameter and entries, whatever buckets they lie in.

A **slot** holds the residuals of one vector that is reduced in every step, in the vector's order. Where vectors change (buckets
are built anew, chunks have another size, a run goes on with other ranks), a slot's entries move to the slot that now has them,
and those of which this rank no longer holds the shard become **strays**: ``carry_into`` adds them to the rank's own gradients
before the first level. Sums are linear, so nothing is lost or counted twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from threading import RLock

import torch
from torch import Tensor

from laneway.cluster.drop.pattern import Pattern
from laneway.cluster.drop.pieces import PADDING, Piece, Pieces

__all__ = ["Residuals", "Slot"]


@dataclass
class Slot:
    """One vector: its residuals (None where there is no feedback), its pattern, and the last step in which it was reduced."""

    pieces: Pieces
    residual: Tensor | None
    pattern: Pattern
    last: int

    def strays(self) -> list[tuple[Piece, Tensor]]:
        """The residuals by piece, without zeros and padding."""
        if self.residual is None:
            return []
        runs = [(piece, self.residual[start : start + len(piece)]) for start, piece in self.pieces]
        return [(piece, run.clone()) for piece, run in runs if piece.name != PADDING and bool(run.any())]


class Residuals:
    """All slots and strays of a rank.

    Args:
        sample, smoothing: of patterns.
        dtype: of residuals; None: there are none.
    """

    def __init__(self, sample: int, smoothing: float, dtype: torch.dtype | None) -> None:
        self.sample, self.smoothing, self.dtype = sample, smoothing, dtype
        self.slots: dict[Pieces, Slot] = {}
        self.strays: list[tuple[Piece, Tensor]] = []
        self.seen: set[Pieces] = set()
        self.step = 0
        self.lock = RLock()

    def slot(self, pieces: Pieces, device: torch.device) -> Slot:
        """The slot of a vector that is now reduced. A vector that comes again begins a new step."""
        with self.lock:
            if pieces in self.seen:
                self._next_step()
            self.seen.add(pieces)
            slot = self.slots.get(pieces)
            if slot is None:
                slot = self._new(pieces, device)
            elif slot.pattern.root.device != device:
                slot = self._moved(slot, device)
            self.slots[pieces] = slot
            slot.last = self.step
            return slot

    def add(self, pieces: Pieces, residual: Tensor | None, root: Tensor, observed: int, last: int) -> None:
        """A slot from elsewhere, as it was saved."""
        pattern = self._pattern(pieces, root, observed)
        kept = None if self.dtype is None or residual is None else residual.to(self.dtype, copy=True)
        self.slots[pieces] = Slot(pieces, kept, pattern, last)

    def release(self) -> None:
        """Make strays of all slots."""
        with self.lock:
            for pieces in list(self.slots):
                self.strays += self.slots.pop(pieces).strays()

    def carry_into(self, flat: Tensor, pieces: Pieces) -> int:
        """Add the strays that lie in ``pieces`` to ``flat``; where it is not finite they wait. Returns how many entries moved."""
        if not self.strays:
            return 0
        with self.lock:
            moved = 0
            for start, piece in pieces:
                for (low, high), run in self._take(piece, flat[start : start + len(piece)]):
                    flat[start + low : start + high] += run.to(flat.device)
                    moved += high - low
            return moved

    def _next_step(self) -> None:
        for pieces in [pieces for pieces, slot in self.slots.items() if slot.last != self.step]:
            self.strays += self.slots.pop(pieces).strays()
        self.step += 1
        self.seen.clear()

    def _new(self, pieces: Pieces, device: torch.device) -> Slot:
        pattern = Pattern(pieces, self.sample, self.smoothing, device)
        if self.dtype is None:
            return Slot(pieces, None, pattern, self.step)
        names = {piece.name for piece in pieces.pieces} - {PADDING}
        for other in [each for each in self.slots if _overlap(each, pieces, names)]:
            self.strays += self.slots.pop(other).strays()
        residual = torch.zeros(pieces.numel, dtype=self.dtype, device=device)
        for start, piece in pieces:
            for (low, high), run in self._take(piece, None):
                residual[start + low : start + high] += run.to(device, self.dtype)
        return Slot(pieces, residual, pattern, self.step)

    def _moved(self, slot: Slot, device: torch.device) -> Slot:
        residual = None if slot.residual is None else slot.residual.to(device)
        return replace(
            slot, residual=residual, pattern=self._pattern(slot.pieces, slot.pattern.root.to(device), slot.pattern.steps)
        )

    def _pattern(self, pieces: Pieces, root: Tensor, observed: int) -> Pattern:
        pattern = Pattern(pieces, self.sample, self.smoothing, root.device)
        pattern.root, pattern.steps = root.clone(), observed
        return pattern

    def _take(self, wanted: Piece, target: Tensor | None) -> Iterator[tuple[tuple[int, int], Tensor]]:
        """Strays within a piece, taken out: (from, to) counted from the piece's start, and the values."""
        kept: list[tuple[Piece, Tensor]] = []
        for piece, run in self.strays:
            low, high = max(piece.start, wanted.start), min(piece.stop, wanted.stop)
            place = (low - wanted.start, high - wanted.start)
            if piece.name != wanted.name or low >= high or not _finite(target, place):
                kept.append((piece, run))
                continue
            a, b = low - piece.start, high - piece.start
            kept += [(piece.cut(x, y), run[x:y]) for x, y in ((0, a), (b, len(piece))) if x < y]
            yield place, run[a:b]
        self.strays = kept


def _finite(target: Tensor | None, place: tuple[int, int]) -> bool:
    return target is None or bool(target[place[0] : place[1]].isfinite().all())


def _overlap(one: Pieces, other: Pieces, names: set[str]) -> bool:
    mine = [piece for piece in one.pieces if piece.name in names]
    return any(a.name == b.name and a.start < b.stop and b.start < a.stop for a in mine for b in other.pieces)
