"""From what was measured to a decision: a pure function of numbers that all ranks have in common. No torch here.

A plan is kept until another one is better by a margin, for several steps one after the other. What was measured long ago is
tried again, for one step, where the best it ever did is better than what runs now: so a link that was slow once is not given up
for good. Places that never ran a task are looked at now and then, less and less often.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from laneway.cluster.decisions import digest
from laneway.cluster.tasks.costs import Costs
from laneway.cluster.tasks.load import LoadRow
from laneway.cluster.tasks.solve import Option, Solution, solve, value

__all__ = ["Chooser", "Decision", "Rules"]

LOOKS = 4
"""Places that are tried where the load has changed: those that promise most."""
NOISE = 1.0
"""Times the noise of what runs now: a difference that says something."""
LONGEST = 8
"""Times ``refresh``: the longest wait for another try."""


@dataclass(frozen=True)
class Rules:
    """When a plan gives way to another.

    Attributes:
        gain: the share of its seconds that another plan must save.
        patience: steps in a row in which it must.
        refresh: steps after which a measurement is old; each try that was in vain doubles them for that place.
    """

    gain: float = 0.1
    patience: int = 3
    refresh: int = 8


@dataclass(frozen=True)
class Decision:
    """Where everything runs in a step.

    Attributes:
        step: of which it is.
        places: the name of the place of each task that is due.
        seconds: when the busiest rank is expected to be done, from the begin of the step's own work.
        reason: "first", "kept", "better", "trial", or "end of trial".
        changed: the tasks that ran elsewhere before.
    """

    step: int
    places: dict[str, str]
    seconds: float
    reason: str
    changed: tuple[str, ...] = ()
    indices: dict[int, int] = field(default_factory=dict, repr=False)

    def digest(self) -> int:
        """A number of 48 bits: ranks whose digests are equal have decided the same."""
        return digest(repr((self.step, sorted(self.places.items()), self.reason)))


class Chooser:
    """Remembers what runs where, and decides."""

    def __init__(self, costs: Costs, rules: Rules) -> None:
        self.costs, self.rules = costs, rules
        self.picks: dict[int, int] = {}  # the place of each task that has run
        self.streak = 0
        self.trial: tuple[int, int] | None = None
        self.waits: dict[tuple[int, int], int] = {}
        self.ran: dict[int, int] = {}
        self.usual: dict[int, float] = {}  # seconds of each task where it runs, as they were when it was last looked elsewhere
        self.doubts: set[tuple[int, int]] = set()
        self.explore = self.pause = 1  # no look at a new place before that step; steps from there to the next look

    def learn(self, rows: Sequence[LoadRow], step: int) -> None:
        """Take in the numbers of a step."""
        self.costs.learn(rows, step)

    def choose(self, step: int) -> Decision:
        """The decision of a step. Called once a step, in order."""
        due = [number for number, task in enumerate(self.costs.tasks) if task.due(step)]
        reason = self._after_trial()
        new = [number for number in due if number not in self.picks]
        if not due:
            return self._decision(step, {}, "kept")
        options = [self._options(number) for number in due]
        kept = self._solve(options, [self._allowed(number, number in new) for number in due])
        best = self._solve(options, [list(range(len(places))) for places in options])
        if self._better(kept, best):
            self.streak += 1
        else:
            self.streak = 0
        picks = kept.picks
        if self.streak >= self.rules.patience:
            picks, reason, self.streak = best.picks, "better", 0
        elif new:
            reason = "first"
        self.picks.update(zip(due, picks, strict=True))
        chosen = {number: self.picks[number] for number in due}
        if (trial := self._next_trial(due, step)) is not None:
            self.trial, reason = trial, "trial"
            self.doubts.discard(trial)
            chosen[trial[0]] = trial[1]
        return self._decision(step, chosen, reason)

    def state_dict(self) -> dict[str, Any]:
        """All that the next decision depends on; the same on every rank."""
        return {
            "costs": self.costs.state_dict(),
            "picks": {str(number): index for number, index in self.picks.items()},
            "streak": self.streak,
            "usual": {str(number): seconds for number, seconds in self.usual.items()},
            "doubts": [list(pair) for pair in sorted(self.doubts)],
            "explore": self.explore,
            "pause": self.pause,
            "ran": {str(number): index for number, index in self.ran.items()},
            "trial": None if self.trial is None else list(self.trial),
            "waits": [[*key, wait] for key, wait in self.waits.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Undo of ``state_dict``."""
        self.costs.load_state_dict(state["costs"])
        self.picks = {int(number): index for number, index in state["picks"].items()}
        self.ran = {int(number): index for number, index in state["ran"].items()}
        self.usual = {int(number): seconds for number, seconds in state["usual"].items()}
        self.doubts = {(number, index) for number, index in state["doubts"]}
        self.streak, self.explore, self.pause = state["streak"], state["explore"], state["pause"]
        self.trial = None if state["trial"] is None else (state["trial"][0], state["trial"][1])
        self.waits = {(number, index): wait for number, index, wait in state["waits"]}

    def _options(self, number: int) -> list[Option]:
        places = self.costs.tasks[number].places
        return [Option(self.costs.seconds(number, index), place.ranks) for index, place in enumerate(places)]

    def _allowed(self, number: int, new: bool) -> list[int]:
        """What a task may choose from without giving up its place; one that is seldom due may choose freely: it can't flap."""
        task = self.costs.tasks[number]
        return list(range(len(task.places))) if new or task.every > 1 else [self.picks[number]]

    def _solve(self, options: Sequence[Sequence[Option]], allowed: Sequence[Sequence[int]]) -> Solution:
        among = [[every[index] for index in indices] for every, indices in zip(options, allowed, strict=True)]
        found = solve(among, self.costs.busy)
        picks = tuple(indices[pick] for indices, pick in zip(allowed, found.picks, strict=True))
        return Solution(picks, found.end, found.work, found.exact)

    def _better(self, kept: Solution, best: Solution) -> bool:
        """By the margin, of what the tasks add to the busiest rank's own work; where they add nothing, of their work."""
        floor, least = max(self.costs.busy), 1 - self.rules.gain
        added = kept.end - floor
        if best.end < kept.end and added > 0:
            return best.end - floor <= least * added
        return best.end <= kept.end and best.work < least * kept.work

    # -- trials

    def _after_trial(self) -> str:
        """A place that was tried takes over where it was better by the margin."""
        if self.trial is None:
            return "kept"
        (number, index), self.trial = self.trial, None
        seen, now = self.costs.seen[number], self.picks[number]
        if index not in seen or now not in seen:
            return "end of trial"
        options = [self._options(number)]
        if self._better(value(options, self.costs.busy, [now]), value(options, self.costs.busy, [index])):
            self.picks[number] = index
            self.usual.pop(number, None)
            self.doubts = {pair for pair in self.doubts if pair[0] != number}
            self.waits = {pair: wait for pair, wait in self.waits.items() if pair[0] != number}
            self.pause = 1
            return "better"
        wait = 2 * self.waits.get((number, index), self.rules.refresh)
        self.waits[number, index] = min(wait, LONGEST * self.rules.refresh)
        return "end of trial"

    def _next_trial(self, due: Sequence[int], step: int) -> tuple[int, int] | None:
        """A way that nothing is known of; else, of the places that were not measured for long, the one that promises most."""
        ready = [number for number in due if self.picks[number] in self.costs.seen[number]]
        others = [(n, index) for n in ready for index in range(len(self.costs.tasks[n].places)) if index != self.picks[n]]
        for number, index in others:
            if not self.costs.known(number, index):
                return number, index
        self._doubt(ready, others)
        costs, old = self.costs, [pair for pair in others if step - self.costs.last(*pair) > self._wait(pair)]
        ranked = sorted(old, key=lambda pair: (costs.seconds(*pair) / (costs.seconds(pair[0], self.picks[pair[0]]) or 1), pair))
        found = next((pair for pair in ranked if pair in self.doubts or self._promises(*pair)), None)
        if found is None and step > self.explore:
            found = next((pair for pair in ranked if costs.last(*pair) < 0 and self._no_worse(*pair)), None)
            self.pause = min(2 * self.pause, LONGEST * self.rules.refresh)
            self.explore = step + self.pause
        return found

    def _doubt(self, ready: Sequence[int], others: Sequence[tuple[int, int]]) -> None:
        """Where what runs now has become slower or faster by twice the margin, what was measured elsewhere no longer holds.

        Slower, but as fast as anything ever was: then there is nothing to look for.
        """
        gain = self.rules.gain
        for number in ready:
            now = self.costs.seconds(number, self.picks[number])
            usual = self.usual.setdefault(number, now)
            if abs(now - usual) > max(2 * gain * usual, NOISE * self.costs.noise(number, self.picks[number])):
                self.usual[number] = now
                if now > usual and now <= (1 + gain) * self.costs.least(number):
                    continue
                near = [pair for pair in others if pair[0] == number and not self.costs.strays(*pair)]
                mine = sorted(near, key=lambda pair: (self.costs.seconds(*pair), pair))
                self.doubts |= set(mine[:LOOKS])

    def _wait(self, pair: tuple[int, int]) -> int:
        return self.waits.get(pair, self.rules.refresh)

    def _promises(self, number: int, index: int) -> bool:
        """Whether it did better once than what runs now does."""
        now = self.picks[number]
        doubt = NOISE * self.costs.noise(number, now)
        return self.costs.best(number, index) <= (1 - self.rules.gain) * self.costs.seconds(number, now) - doubt

    def _no_worse(self, number: int, index: int) -> bool:
        return self.costs.seconds(number, index) <= (1 + self.rules.gain) * self.costs.seconds(number, self.picks[number])

    def _decision(self, step: int, chosen: dict[int, int], reason: str) -> Decision:
        tasks = self.costs.tasks
        numbers = sorted(chosen)
        found = value([self._options(n) for n in numbers], self.costs.busy, [chosen[n] for n in numbers])
        places = {tasks[n].name: tasks[n].places[chosen[n]].name for n in numbers}
        changed = tuple(tasks[n].name for n in numbers if self.ran.get(n) != chosen[n])
        self.ran.update(chosen)
        return Decision(step, places, found.end, reason, changed, {n: chosen[n] for n in numbers})
