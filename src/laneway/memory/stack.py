"""Several tiers as one: a block goes to the first of them that has room for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from laneway.core import InputError, LanewayError, positive_int
from laneway.memory.tier import Ended, Slot, Tier, TierFullError, Traffic, Transfer

if TYPE_CHECKING:
    import torch


class StackedTier(Tier):
    """``tiers``, the fastest first. A block stays in the tier that it was put in.

    A backward pass uses last what was saved first. So where it is known how much a pass will move (``expect``) and that is more
    than the tiers above hold, the first blocks go to the lower ones, and what comes back first lies in the fastest. Without that
    knowledge blocks go down as the tiers above fill up. Each tier keeps its own throttle.

    Args:
        tiers: two or more; the stack closes them.

    Raises:
        InputError: fewer than two tiers, or one twice.
    """

    def __init__(self, tiers: Sequence[Tier]) -> None:
        if len(tiers) < 2 or len({id(tier) for tier in tiers}) < len(tiers):
            raise InputError("tiers", [tier.name for tier in tiers], "two or more different tiers")
        super().__init__("+".join(tier.name for tier in tiers), sum(tier.capacity for tier in tiers))
        self.tiers = tuple(tiers)
        self.traffic = _Sum(self.tiers)
        self._places: dict[int, tuple[Tier, Slot]] = {}
        self._serial = 0
        self._below = [0] * len(tiers)  # bytes that are still to go below each tier
        self._closed = False

    def expect(self, nbytes: int) -> None:
        """So many bytes are to be put in from now on, in the reverse order of their coming back."""
        self._below, rest = [], nbytes
        for tier in self.tiers:
            rest = max(0, rest - (tier.capacity - tier.used))
            self._below.append(rest)

    def allocate(self, nbytes: int) -> Slot:
        """Room in the first tier that has some and need not be kept for what comes back earlier."""
        positive_int("nbytes", nbytes)
        if self._closed:
            raise LanewayError(f"{self.name} tier: it is closed")
        start = sum(below >= nbytes for below in self._below[:-1])
        order = [*range(start, len(self.tiers)), *range(start - 1, -1, -1)]
        for number in order:
            tier = self.tiers[number]
            try:
                slot = tier.allocate(nbytes)
            except TierFullError:
                continue
            self._below = [max(0, below - nbytes) if number > at else below for at, below in enumerate(self._below)]
            self._serial += 1
            self._places[self._serial] = tier, slot
            self._took(nbytes)
            return Slot(self._serial, nbytes)
        raise TierFullError(f"{self.name} tier: {nbytes} bytes don't fit into any of them")

    def place(self, slot: Slot) -> Tier:
        """The tier that a slot lies in.

        Raises:
            LanewayError: it isn't allocated.
        """
        return self._place(slot)[0]

    def release(self, slot: Slot) -> None:
        """Give the room back to its tier. After ``close`` there is nothing left to give."""
        if self._closed:
            return
        tier, inner = self._place(slot)
        tier.release(inner)
        del self._places[slot.offset]
        self.used -= slot.nbytes

    def write(self, slot: Slot, source: torch.UntypedStorage | None, ended: Ended) -> Transfer:
        """A transfer of the slot's tier."""
        tier, inner = self._place(slot)
        return tier.write(inner, source, ended)

    def read(self, slot: Slot, target: torch.UntypedStorage | None, ended: Ended, *, urgent: bool = False) -> Transfer:
        """A transfer of the slot's tier."""
        tier, inner = self._place(slot)
        return tier.read(inner, target, ended, urgent=urgent)

    def poll(self) -> None:
        """Notice what has ended in any of them."""
        for tier in self.tiers:
            tier.poll()

    def bandwidth(self) -> tuple[float, float]:
        """Bytes per second each way, as much in each tier as moved there; before anything moved, those of the first."""
        rates = [tier.bandwidth() for tier in self.tiers]
        found = []
        for way, moved in enumerate(([t.traffic.bytes_written for t in self.tiers], [t.traffic.bytes_read for t in self.tiers])):
            seconds = sum(nbytes / rate[way] for nbytes, rate in zip(moved, rates, strict=True) if nbytes)
            found.append(sum(moved) / seconds if seconds else rates[0][way])
        return found[0], found[1]

    def close(self) -> None:
        """Close them all."""
        self._closed = True
        for tier in self.tiers:
            tier.close()
        self._places.clear()
        self.used = 0

    def _place(self, slot: Slot) -> tuple[Tier, Slot]:
        found = self._places.get(slot.offset)
        if found is None or found[1].nbytes != slot.nbytes:
            raise LanewayError(f"{self.name} tier: {slot} isn't allocated, or was released")
        return found


class _Sum(Traffic):
    """Traffic of several tiers together."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._tiers = tiers

    def __getattribute__(self, name: str) -> object:
        if name in Traffic.__dataclass_fields__:
            return sum(getattr(tier.traffic, name) for tier in self._tiers)
        return super().__getattribute__(name)
