"""Which entries leave fast memory when room is needed: policies as functions of what can be seen, with no memory of their own.

A policy gets a ``View`` (bytes wanted, the entries that may go, how busy the link is) and returns victims, best first, that
together free at least the bytes wanted, or all there are. It may say of a victim that it is dropped and recomputed later instead
of moved. Nothing here knows tensors: the simulated device (``replay``) and ``DynamicAllocator`` call the same functions.

Times are seconds on the clock of the view; sizes are bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Protocol

SOON = 1e-6
"""Shortest wait until a next use that counts, in seconds."""


class Candidate(Protocol):
    """What a policy sees of an entry in fast memory."""

    @property
    def nbytes(self) -> int:
        """Size."""

    @property
    def born(self) -> float:
        """When it came into fast memory."""

    @property
    def last_use(self) -> float:
        """When it was last produced, written or used."""

    @property
    def next_use(self) -> float:
        """When it is expected to be used next; infinity for never."""

    @property
    def known_use(self) -> float:
        """When it really is used next, for the clairvoyant bound; a view of the real world repeats ``next_use``."""

    @property
    def depth(self) -> int | None:
        """Place of its module in the order of the forward pass."""

    @property
    def write_seconds(self) -> float:
        """Time of the link to move it out: 0 where the slower memory has it already."""

    @property
    def in_flight_seconds(self) -> float:
        """Time until a write that has begun is done, and its bytes are free; 0 where there is none."""

    @property
    def reload_seconds(self) -> float:
        """Time of the link to bring it back."""

    @property
    def recompute_seconds(self) -> float | None:
        """Compute to make it again; None where it can't be dropped now."""


@dataclass(frozen=True, slots=True)
class View:
    """What can be seen at the moment room is needed."""

    now: float
    need: int
    """Bytes wanted."""
    residents: Sequence[Candidate]
    """Entries that may go: none that is in use or on its way."""
    read_busy: float = 0.0
    """Share of the recent time in which the link brought something in, 0 … 1."""
    write_busy: float = 0.0
    """The same for moving out."""
    read_backlog: float = 0.0
    """Seconds until the link has brought in what was asked for."""
    write_backlog: float = 0.0
    """Seconds until it has moved out what was asked for."""
    urgent: bool = True
    """The step waits for the room; False where it is made ahead."""


@dataclass(frozen=True, slots=True)
class Victim:
    """An entry to go, moved out or dropped."""

    entry: Candidate
    drop: bool = False
    """Drop it and recompute it at its next use."""


Policy = Callable[[View], list[Victim]]


def fifo(view: View) -> list[Victim]:
    """First in, first out."""
    return _take(view, sorted(view.residents, key=lambda entry: entry.born))


def lru(view: View) -> list[Victim]:
    """Least recently used first."""
    return _take(view, sorted(view.residents, key=lambda entry: entry.last_use))


def belady(view: View) -> list[Victim]:
    """The clairvoyant bound: farthest next use first (Belady, IBM Systems Journal 5, 1966), large before small.

    With entries of one size no policy loads less often. With different sizes the optimum is NP-hard; entries that turn out not
    to be needed for the room are kept (nearest next use first), which makes it a good bound, not a strict one.
    """
    found = _take(view, sorted(view.residents, key=lambda entry: (-entry.known_use, -entry.nbytes)))
    return _without_surplus(view, found)


@dataclass(frozen=True, slots=True)
class Tuning:
    """What ``cost_aware`` can be set to; ``VARIANTS`` are tried in the simulated device.

    ``trust`` is the share of the link's idle time that is believed to hide transfers (0 none: every transfer costs its time).
    ``recompute`` is the weight of the time to recompute over that of the link (infinity never drops).
    """

    trust: float = 1.0
    recompute: float = 1.0


FLOOR = 0.05
"""Part of a transfer that no idle time hides: the link may have better things to do."""


def cost_aware(view: View, tuning: Tuning = Tuning()) -> list[Victim]:
    """Lowest value first: the cost of having the entry again, per byte and second that it would be gone.

    The cost is the smaller of moving and recomputing. Moving costs the reload, less what the idle link hides before the next use,
    and the time until it is out (of a copy under way: what is left of it), if the step waits for that. So an idle link never
    recomputes and a full one does; an entry that is long not needed goes first, as in Belady's rule, and among those the cheap
    ones. Entries that turn out not to be needed for the room are kept.
    """
    now, trust, recompute = view.now, tuning.trust, tuning.recompute
    hiding, backlog = trust * (1.0 - view.read_busy), trust * view.read_backlog
    queue = trust * view.write_backlog if view.urgent else 0.0
    writes = 1.0 if view.urgent else 1.0 - trust * (1.0 - FLOOR)
    scored: list[tuple[float, Candidate, bool]] = []
    for entry in view.residents:
        wait = entry.next_use - now
        if wait < SOON:
            wait = SOON
        cost = 0.0
        if wait < math.inf:
            cost = reload = entry.reload_seconds
            hidden = hiding * wait - backlog
            if hidden > 0.0:
                cost = max(FLOOR * reload, reload - hidden)
        write = entry.write_seconds
        if write:
            cost += writes * write + queue
        elif view.urgent:
            cost += trust * entry.in_flight_seconds
        drop = False
        if recompute < math.inf:
            again = entry.recompute_seconds
            if again is not None and recompute * again < cost:
                drop, cost = True, recompute * again
        scored.append((cost / (entry.nbytes * wait), entry, drop))
    scored.sort(key=itemgetter(0))
    return _without_surplus(view, _cover(view.need, (Victim(entry, drop) for _, entry, drop in scored)))


def _take(view: View, order: Iterable[Candidate]) -> list[Victim]:
    return _cover(view.need, map(Victim, order))


def _cover(need: int, order: Iterable[Victim]) -> list[Victim]:
    found: list[Victim] = []
    for victim in order:
        if need <= 0:
            break
        found.append(victim)
        need -= victim.entry.nbytes
    return found


def _without_surplus(view: View, victims: list[Victim]) -> list[Victim]:
    """Keep those that are not needed, the most valuable of them first."""
    surplus = sum(victim.entry.nbytes for victim in victims) - view.need
    kept: list[Victim] = []
    for victim in reversed(victims):
        if victim.entry.nbytes <= surplus:
            surplus -= victim.entry.nbytes
        else:
            kept.append(victim)
    return kept[::-1]


POLICIES: dict[str, Policy] = {"fifo": fifo, "lru": lru, "belady": belady, "cost_aware": cost_aware}
"""Policies by name. ``belady`` needs the future, so only the simulated device has it."""

VARIANTS: dict[str, dict[str, Policy]] = {
    "cost_aware": {
        "default": cost_aware,
        **{
            f"trust {trust:g}, recompute {recompute:g}": partial(cost_aware, tuning=Tuning(trust=trust, recompute=recompute))
            for trust, recompute in ((0.0, 0.5), (0.0, 1.0), (1.0, math.inf))
        },
        "recency": lru,
    }
}
"""What a policy chooses between by trying each on the steps it has seen, once more; the first is used until then."""
