"""Time as the memory manager sees it: the wall's, or one that moves only when it is told to."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds from some fixed start."""

    def now(self) -> float:
        """Seconds."""


class WallClock:
    """Real time."""

    def now(self) -> float:
        """Seconds of the monotonic clock."""
        return time.perf_counter()


class VirtualClock:
    """Time that stands still between calls of ``advance``: the same calls give the same times on every machine."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        """Seconds advanced so far."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` ≥ 0 pass."""
        if seconds < 0:
            raise ValueError(f"time can't go back by {-seconds} s")
        self._now += seconds

    def advance_to(self, moment: float) -> None:
        """Let time pass until ``moment``, if it lies ahead."""
        self._now = max(self._now, moment)
