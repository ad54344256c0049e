"""One entry of a trace as the simulated device and its policies see it."""

from __future__ import annotations

import math
from collections.abc import Callable

from laneway.memory.link import Link
from laneway.memory.trace import Entry, Trace


class Held:
    """One entry as the device and its policies see it."""

    __slots__ = (
        "again", "alive", "arrival", "born", "copied", "depth", "dropped", "entry", "known_use", "last_use", "nbytes", "next_use",
        "now", "number", "out_seconds", "reload_seconds", "resident", "sure",
    )  # fmt: skip

    def __init__(
        self, number: int, entry: Entry, link: Link, again: Callable[[Held], float | None], now: Callable[[], float]
    ) -> None:
        self.number, self.entry, self.nbytes, self.depth = number, entry, entry.nbytes, entry.depth
        self.out_seconds, self.reload_seconds = link.out_seconds(entry.nbytes), link.in_seconds(entry.nbytes)
        self.born = self.last_use = 0.0
        self.next_use = self.known_use = math.inf
        self.alive = self.sure = self.resident = self.dropped = False
        self.arrival = 0.0
        self.copied: float | None = None  # when slow memory has it as it is now; None: it does not
        self.again, self.now = again, now

    @property
    def write_seconds(self) -> float:
        """Time of the link to move it out."""
        return self.out_seconds if self.copied is None else 0.0

    @property
    def in_flight_seconds(self) -> float:
        """Time until the write that has begun is done."""
        return 0.0 if self.copied is None else max(self.copied - self.now(), 0.0)

    @property
    def recompute_seconds(self) -> float | None:
        """Compute, and reloads of inputs, to make it again; None where it can't be dropped now."""
        return self.again(self)


class Level:
    """Bytes that live, in fast memory or not, with those that are not managed: the most at once, in this step and the last."""

    def __init__(self, live: int) -> None:
        self.live, self._top = live, 0
        self._before: float = math.inf

    @property
    def most(self) -> float:
        """Most bytes in the step before, or in this one where those are more; infinity in the first."""
        return max(self._before, self._top)

    def begin_step(self) -> None:
        """The step before is known."""
        self._before, self._top = self._top, 0

    def add(self, nbytes: int, other: int = 0) -> None:
        """So many more live, beside ``other`` that are not managed; negative: fewer."""
        self.live += nbytes
        self._top = max(self._top, self.live + other)


def known_uses(trace: Trace) -> list[float]:
    """For every event, the time of compute of the entry's next use (later events a little later); infinity for none."""
    times, now = [], 0.0
    for event in trace.events:
        now += event.gap
        times.append(now)
    following: dict[int, float] = {}
    found = [math.inf] * len(trace.events)
    for index in range(len(trace.events) - 1, -1, -1):
        event = trace.events[index]
        found[index] = following.get(event.entry, math.inf)
        if event.action == "use":
            following[event.entry] = times[index] + index * 1e-12
        elif event.action == "produce":
            following.pop(event.entry, None)
    return found
