"""Collectives and transfers on one link: what is in flight, and for how long they were in each other's way. No torch here."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager

from laneway.memory.clock import Clock, WallClock


class Sharing:
    """Counts collectives and transfers that have begun and not ended; calling it says whether any collective is in flight.

    Attributes:
        seen: collectives so far.
        contention_seconds: time in which at least one collective and at least one transfer were under way.
        held_seconds: time that queued transfers waited while a collective was in flight, summed over the queues.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock or WallClock()
        self._lock = threading.Lock()
        self._collectives = self._transfers = self.seen = 0
        self._since = 0.0
        self.contention_seconds = self.held_seconds = 0.0

    def __call__(self) -> bool:
        """Whether any collective is in flight."""
        return self._collectives > 0

    def begin(self) -> None:
        """A collective begins."""
        self._change(1, 0)

    def end(self) -> None:
        """A collective has ended."""
        self._change(-1, 0)

    @contextmanager
    def collective(self) -> Generator[None]:
        """Around one that blocks."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    @contextmanager
    def transfer(self) -> Generator[None]:
        """Around a transfer."""
        self._change(0, 1)
        try:
            yield
        finally:
            self._change(0, -1)

    def held(self, seconds: float) -> None:
        """A queue of transfers waited for a collective."""
        with self._lock:
            self.held_seconds += seconds

    def _change(self, collectives: int, transfers: int) -> None:
        with self._lock:
            now = self.clock.now()
            if self._collectives and self._transfers:
                self.contention_seconds += now - self._since
            self._since = now
            self._collectives += collectives
            self._transfers += transfers
            self.seen += max(0, collectives)
