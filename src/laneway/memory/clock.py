"""Time as the memory manager sees it: the wall's, or one that moves only when it is told to."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
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


class MovedClock(Clock, Protocol):
    """A clock that waiting can be added to."""

    def advance(self, seconds: float) -> None:
        """Let time pass."""

    def advance_to(self, moment: float) -> None:
        """Let time pass until ``moment``, if it lies ahead."""


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


class ComputeClock:
    """CPU seconds of this thread, and the waiting that is added: how long a pass takes with a link that is only modelled.

    What happens ``aside`` doesn't count: it is the modelling's own work.
    """

    def __init__(self) -> None:
        self._shift = 0.0

    def now(self) -> float:
        """Seconds of computing and waiting."""
        return time.thread_time() + self._shift

    def advance(self, seconds: float) -> None:
        """Wait."""
        self._shift += seconds

    def advance_to(self, moment: float) -> None:
        """Wait until ``moment``, if it lies ahead."""
        self._shift += max(0.0, moment - self.now())

    @contextmanager
    def aside(self) -> Generator[None]:
        """Time in here does not pass."""
        start = time.thread_time()
        try:
            yield
        finally:
            self._shift -= time.thread_time() - start
