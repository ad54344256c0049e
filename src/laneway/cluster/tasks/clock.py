"""How long this thread has worked, and how much longer that took because others were at work on the same cores."""

from __future__ import annotations

import math
import time
from pathlib import Path

__all__ = ["WorkClock"]

STATISTICS = Path("/proc/thread-self/schedstat")
LEAST_S = 0.0005
"""Of work, for a ratio that says something."""


class WorkClock:
    """Seconds that the calling thread ran, and those that it was ready to run and had to wait for a core.

    Where Linux counts the wait, waiting for messages does not look like work, and work on a crowded machine does not look like
    little. Elsewhere only the seconds on a core are known.
    """

    def __init__(self) -> None:
        self._ran, self._waited = self._now()

    def take(self) -> tuple[float, float]:
        """Since the last call: seconds of work with its waits, and how many times the work without them (NaN: too little)."""
        before, (self._ran, self._waited) = (self._ran, self._waited), self._now()
        ran, waited = self._ran - before[0], self._waited - before[1]
        return ran + waited, (ran + waited) / ran if ran >= LEAST_S else math.nan

    def _now(self) -> tuple[float, float]:
        try:
            ran, waited = STATISTICS.read_text("ascii").split()[:2]
        except (OSError, ValueError):
            return time.thread_time(), 0.0
        return int(ran) / 1e9, int(waited) / 1e9
