"""The link between fast and slow memory, and what each way of it is doing, on a virtual clock."""

from __future__ import annotations

import math
from dataclasses import dataclass

from laneway.core import InputError


@dataclass(frozen=True)
class Link:
    """Bandwidth each way in bytes per second, latency of every transfer in seconds, and whether both ways work at once.

    Raises:
        InputError: a bandwidth is not positive or the latency is negative.
    """

    out_bytes_per_second: float
    in_bytes_per_second: float
    latency: float = 1e-4
    duplex: bool = True

    def __post_init__(self) -> None:
        for name in ("out_bytes_per_second", "in_bytes_per_second"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(name, getattr(self, name), "a number > 0")
        if not 0 <= self.latency < math.inf:
            raise InputError("latency", self.latency, "seconds ≥ 0")

    def out_seconds(self, nbytes: int) -> float:
        """Time to move ``nbytes`` out."""
        return self.latency + nbytes / self.out_bytes_per_second

    def in_seconds(self, nbytes: int) -> float:
        """Time to bring ``nbytes`` in."""
        return self.latency + nbytes / self.in_bytes_per_second


class Way:
    """One direction of a link: transfers in order, how long it is booked, how busy it was of late."""

    def __init__(self) -> None:
        self.free_at = 0.0
        self._share, self._seen = 0.0, 0.0

    def book(self, seconds: float, now: float) -> float:
        """Append a transfer asked for at ``now``; returns when it is done."""
        start = max(now, self.free_at)
        self.free_at = start + seconds
        return self.free_at

    def backlog(self, now: float) -> float:
        """Seconds until everything booked is done."""
        return max(self.free_at - now, 0.0)

    def observe(self, now: float, span: float) -> None:
        """Take the time since the last look into the running share of busy time (decay over ``span`` seconds)."""
        passed = now - self._seen
        if passed <= 0:
            return
        busy = min(max(self.free_at - self._seen, 0.0), passed) / passed
        kept = math.exp(-passed / span) if span > 0 else 0.0
        self._share = kept * self._share + (1.0 - kept) * busy
        self._seen = now

    @property
    def busy(self) -> float:
        """Share of the recent time with a transfer, 0 … 1."""
        return self._share
