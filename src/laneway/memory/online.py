"""Whom to send out in a pass that has no plan: the policies of ``policies`` over the entries of the books."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from laneway.memory.entries import Entry
from laneway.memory.policies import POLICIES, View
from laneway.memory.residency import Residency


@dataclass(frozen=True, slots=True)
class _Seen:
    """An entry as a policy sees it. Times are seconds since the pass began."""

    entry: Entry
    nbytes: int
    born: float
    last_use: float
    next_use: float
    write_seconds: float
    reload_seconds: float
    recompute_seconds: float | None = None  # what autograd has saved by now has no recipe any more

    @property
    def in_flight_seconds(self) -> float:
        """What is on its way out is not idle."""
        return 0.0

    @property
    def known_use(self) -> float:
        """Nobody knows."""
        return self.next_use

    @property
    def depth(self) -> int:
        """Entries come in the order of the forward pass."""
        return self.entry.index


def victims(
    policy: str, books: Residency, elapsed: Callable[[], float], bandwidth: tuple[float, float]
) -> Callable[[list[Entry], float], Iterable[Entry]]:
    """For ``Schedule.victims``.

    A backward pass uses last what was saved first, so an entry's next use is expected as far behind the turn of the pass as it
    was saved before it; the turn is taken to be now.

    Args:
        policy: a name of ``POLICIES``.
        books: of the pass.
        elapsed: seconds since it began.
        bandwidth: of the tier, bytes per second each way.
    """
    choose = POLICIES[policy]
    write, read = bandwidth

    def chosen(idle: list[Entry], wanted: float) -> Iterable[Entry]:
        now = elapsed()
        an_event = now / max(1, books.event)
        seen = [
            _Seen(
                entry,
                entry.nbytes,
                an_event * entry.index,
                an_event * entry.touched,
                now + an_event * (len(books.entries) - entry.index),
                entry.nbytes / write,
                entry.nbytes / read,
            )
            for entry in idle
        ]
        backlog = books.leaving_bytes / write
        view = View(now, math.ceil(wanted), seen, write_busy=float(backlog > 0), write_backlog=backlog)
        return [victim.entry.entry for victim in choose(view)]  # type: ignore[attr-defined]

    return chosen
