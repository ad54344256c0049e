"""When an entry will be used next, learned from the steps before.

Training repeats itself: the n-th entry of a kind that a module makes in a step (its **role**) is used after the same delays as in
the step before. So the delay from the k-th to the (k+1)-th access of a role is the prediction; after the last one, entries that
live on (parameters, optimizer state) wait for their first access of the next step. Modules that hold experts take part in some
steps only: their entries expect the next step by popularity, the decayed share p of steps with them, 1/p − 1 steps later than one
that is always used. What was never seen is expected after as long again as it has been idle.

Times are seconds of compute, whatever the stalls between.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from laneway.memory.trace import PERSISTENT, Entry

DECAY = 0.9
"""Weight of the past in the popularity of an expert's module, per step."""
PRIOR = 0.2
"""Steps with and without, each, that the popularity starts from."""
SURE = 0.95
"""Popularity from which an expert's module counts as always used."""

Role = tuple[str, str, int]


@dataclass
class _History:
    """Accesses of one role: offsets within the step, in seconds, of the last step that had it, and of this one."""

    learned: list[float] = field(default_factory=list)
    current: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Expected:
    """A prediction."""

    at: float
    """Time of the next use; infinity for never."""
    sure: bool
    """Learned from the step before, not guessed: worth a prefetch."""


class NextUse:
    """Predicts next uses while the accesses of a run go by.

    ``begin_step(now)`` at the start of every step, ``access(entry, now)`` at every produce or use, ``forget`` when it is freed.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._entries = entries
        self._sporadic = {entry.module for entry in entries if entry.kind == "expert"}
        self._uses: dict[str, float] = {}  # decayed number of steps with the module, and of all
        self._weight = 0.0
        self._seen_modules: set[str] = set()
        self._roles: dict[int, Role] = {}
        self._counts: dict[tuple[str, str], int] = {}
        self._lasting: dict[tuple[str, str], int] = {}
        self._histories: dict[Role, _History] = {}
        self._peers: dict[tuple[str, int | None, int], float] = {}
        self._start, self._length, self._steps = 0.0, math.inf, 0

    @property
    def step_seconds(self) -> float:
        """Compute of the last step; infinity in the first."""
        return self._length

    def begin_step(self, now: float) -> None:
        """End the step before and learn from it."""
        if self._steps:
            self._length = max(now - self._start, 0.0)
            self._learn()
        self._steps += 1
        self._start = now
        self._counts.clear()

    def _learn(self) -> None:
        for history in self._histories.values():
            if history.current:
                history.learned, history.current = history.current, []
        for module in self._sporadic:
            used = float(module in self._seen_modules)
            self._uses[module] = DECAY * self._uses.get(module, 0.0) + used
        self._weight = DECAY * self._weight + 1.0
        self._seen_modules.clear()

    def _role(self, number: int) -> Role:
        role = self._roles.get(number)
        if role is None:
            entry = self._entries[number]
            counts = self._lasting if entry.kind in PERSISTENT else self._counts
            ordinal = counts.get((entry.kind, entry.module), 0)
            counts[entry.kind, entry.module] = ordinal + 1
            role = self._roles[number] = (entry.kind, entry.module, ordinal)
        return role

    def access(self, number: int, now: float) -> Expected:
        """Entry ``number`` is produced, written or used now; when will it be used again?"""
        entry, role = self._entries[number], self._role(number)
        history = self._histories.setdefault(role, _History())
        offset, past = now - self._start, history.learned
        index = len(history.current)
        if index:
            self._peers[entry.kind, entry.depth, index - 1] = offset - history.current[-1]
        history.current.append(offset)
        if entry.module in self._sporadic:
            self._seen_modules.add(entry.module)
        if index + 1 < len(past):
            return Expected(now + past[index + 1] - past[index], True)
        if past:
            return self._after_last(entry, past)
        delay = self._peers.get((entry.kind, entry.depth, index))
        return Expected(math.inf if delay is None else now + delay, False)

    def _after_last(self, entry: Entry, past: list[float]) -> Expected:
        """Nothing more in this step, if it is like the one before."""
        if entry.kind not in PERSISTENT:
            return Expected(math.inf, True)
        return self._in_step(entry, self._start + self._length + past[0])

    def _in_step(self, entry: Entry, first: float) -> Expected:
        """First access of a step at ``first``, if the entry takes part in that step; else of a later one."""
        if entry.module not in self._sporadic:
            return Expected(first, True)
        popularity = (self._uses.get(entry.module, 0.0) + PRIOR) / (self._weight + 2.0 * PRIOR)
        return Expected(first + (1.0 / popularity - 1.0) * self._length, popularity >= SURE)

    def sporadic(self, number: int) -> bool:
        """Whether the entry lives on but takes part in some steps only."""
        entry = self._entries[number]
        return entry.kind in PERSISTENT and entry.module in self._sporadic

    def again(self, number: int, now: float, expected: float) -> Expected:
        """A fresh prediction, never before ``now``: at the start of a step, or where an ``expected`` use did not come."""
        history = self._histories.get(self._roles.get(number, ("", "", -1)))
        if self.sporadic(number) and history is not None and history.learned and self._length < math.inf:
            first = self._start + history.learned[0]
            if history.current or first <= now:
                first += self._length
            if first > now:  # a step may last longer than the one before
                return self._in_step(self._entries[number], first)
        if expected == math.inf:
            return Expected(math.inf, False)
        return Expected(now + abs(now - expected), False)
