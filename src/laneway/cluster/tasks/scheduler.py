"""Runs tasks where a decision says, measures them, and decides again before the next step. No torch here."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from laneway.cluster.decisions import SameDecision
from laneway.cluster.tasks.choose import Chooser, Decision, Rules
from laneway.cluster.tasks.clock import WorkClock
from laneway.cluster.tasks.costs import Costs
from laneway.cluster.tasks.load import LoadRow, row_size
from laneway.cluster.tasks.members import Members, Place
from laneway.cluster.tasks.task import Task
from laneway.core import InputError, LanewayError, Statistics, positive_int

__all__ = ["TaskScheduler"]

ROWS = "tasks/load"
TROUBLE = "tasks: the ranks decided differently in step {step}; a task's cost or places differ between them"


class TaskScheduler:
    """Decides for every step where each task runs, the same on every rank, and runs this rank's.

    Every rank puts what it measured in a step (its own work, how crowded its cores are, its links, its tasks) among the
    statistics that are reduced once a step anyway. Before the next step each rank works out the decision from all ranks' numbers:
    nothing is sent for it, and it can differ on no rank.

    In each step: ``begin`` (after the statistics of the step before are there), ``run``, ``observe`` for links that were used,
    ``tell`` (before the statistics of this step are sent).

    Args:
        tasks: names must differ.
        members: ranks and levels.
        rank: this one's place.
        links: bytes per second that a rank has at a level, by its name, where they are known before anything is measured.
        rules: when a plan gives way to another.
        stray: factor on the cost of places beyond the level that a task prefers, ≥ 1.
        debug: compare the ranks' decisions, one step later.
        log: told of every decision that changes something.

    Raises:
        InputError: no task, a name given twice, a task that does not fit the members, or a number out of range.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        members: Members,
        *,
        rank: int,
        links: Mapping[str, float] | None = None,
        rules: Rules | None = None,
        stray: float = 2.0,
        debug: bool = False,
        log: Callable[[Decision], object] | None = None,
    ) -> None:
        self.tasks, self.members, self.log = tuple(tasks), members, log
        self.agreement = SameDecision("tasks/decision", debug, TROUBLE)
        self.rules = _checked(rules or Rules())
        names = [task.name for task in self.tasks]
        if not names or len(set(names)) != len(names):
            raise InputError("tasks", names, "at least one task, each name once")
        for task in self.tasks:
            task.check(members)
        if positive_int("rank", rank, 0) >= members.world:
            raise InputError("rank", rank, f"an integer from 0 to {members.world - 1}")
        if not 1 <= stray < math.inf:
            raise InputError("stray", stray, "a number ≥ 1")
        for name, rate in (links or {}).items():
            members.level(name)
            if not 0 < rate < math.inf:
                raise InputError("links", rate, f"bytes per second > 0 for {name}")
        self.rank, self.clock = rank, WorkClock()
        self.chooser = Chooser(Costs(self.tasks, members, links or {}, stray, self.rules.refresh), self.rules)
        self.decision: Decision | None = None
        self._statistics: Statistics | None = None
        self._late: dict[int, tuple[float, float]] = {}
        self._clear()

    def share(self, statistics: Statistics) -> None:
        """Before the first step, on every rank: makes room for what the ranks tell each other."""
        statistics.add(ROWS, row_size(len(self.members.names), len(self.tasks)), "gather")
        self.agreement.share(statistics)
        self._statistics = statistics

    def begin(self, step: int) -> Decision:
        """The decision for a step, from the numbers of the one before. Call it once a step, on every rank, in order.

        Raises:
            LanewayError: ``share`` was not called, or (in debug mode) ranks decided differently in the step before.
        """
        statistics = self._shared()
        self.agreement.compare(statistics, step - 1)
        found = statistics.get(ROWS)
        if found is not None:
            rows = [LoadRow.of(row, len(self.members.names)) for row in found.tolist()]
            self.chooser.learn(rows, step - 1)
        self.decision = decision = self.chooser.choose(step)
        if self.log is not None and decision.changed:
            self.log(decision)
        self._clear()
        self.clock.take()
        return decision

    def run(self, *kinds: str) -> dict[str, Any]:
        """Run this rank's tasks of the step (of some kinds, by default all), in the order they were given; what they return.

        Raises:
            LanewayError: ``begin`` was not called.
        """
        if self.decision is None:
            raise LanewayError("tasks: run() needs the decision of begin()")
        results: dict[str, Any] = {}
        for number, index in self.decision.indices.items():
            task = self.tasks[number]
            place = task.places[index]
            if self.rank not in place.ranks or (kinds and task.kind not in kinds):
                continue
            self._own_work()
            start = time.perf_counter()
            results[task.name] = task.run(place)
            self.measured(task.name, time.perf_counter() - start)
            self._own_work(count=False)
        return results

    def measured(self, name: str, seconds: float, place: Place | None = None) -> None:
        """What a task took, as this rank saw it, where ``run`` can't see all of it; instead of what it saw.

        Args:
            name: of the task.
            seconds: the largest of all ranks counts.
            place: where it ran; by default where this step's decision says.

        Raises:
            InputError: no such task or place.
        """
        number = next((number for number, task in enumerate(self.tasks) if task.name == name), None)
        if number is None:
            raise InputError("name", name, "one of " + ", ".join(task.name for task in self.tasks))
        index = None if self.decision is None else self.decision.indices.get(number)
        if place is not None:
            if place not in self.tasks[number].places:
                raise InputError("place", place.name, f"a place of task {name!r}")
            index = self.tasks[number].places.index(place)
        if index is not None:
            where = self._late if self._told else self._row.tasks
            where[number] = (seconds, float(index))

    def observe(self, level: str, nbytes: float, seconds: float) -> None:
        """Something of ``nbytes`` went between this rank and another of a level, and took ``seconds``."""
        index = self.members.level(level)
        if nbytes > 0:
            self._sent[index][0] += nbytes
            self._sent[index][1] += seconds

    def busy(self, seconds: float) -> None:
        """This rank's own work in the step, where it is not its thread's (on a GPU): instead of what the clock says."""
        self._busy = seconds

    def tell(self) -> None:
        """Puts what this rank has measured among the statistics of the step; what runs later is told in the next one."""
        statistics = self._shared()
        self._own_work()
        self._row.busy = self._worked if self._busy is None else self._busy
        self._row.slow = _mean_ratio(self._ratios)
        self._row.wire = [seconds / nbytes if nbytes else math.nan for nbytes, seconds in self._sent]
        statistics.put(ROWS, self._row.flat())
        if self.decision is not None:
            self.agreement.put(statistics, self.decision.digest())
        self._told = True

    def state_dict(self) -> dict[str, Any]:
        """All that the next decision depends on; the same on every rank."""
        return self.chooser.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Undo of ``state_dict``; nothing, where the tasks or the ranks were others."""
        costs = state["costs"]
        if len(costs["busy"]) == self.members.world and len(costs["seen"]) == len(self.tasks):
            self.chooser.load_state_dict(state)

    def _shared(self) -> Statistics:
        if self._statistics is None:
            raise LanewayError("tasks: the scheduler needs statistics: call share() before the first step")
        return self._statistics

    def _clear(self) -> None:
        self._row = LoadRow.blank(len(self.members.names), len(self.tasks))
        for number, pair in self._late.items():
            self._row.tasks[number] = pair
        self._late, self._told = {}, False
        self._sent = [[0.0, 0.0] for _ in self.members.names]
        self._worked, self._busy = 0.0, None
        self._ratios: list[tuple[float, float]] = []

    def _own_work(self, count: bool = True) -> None:
        """Take the clock's seconds: as this rank's own work, or as a task's, which only say how crowded its cores are."""
        seconds, ratio = self.clock.take()
        if count:
            self._worked += seconds
        if not math.isnan(ratio):
            self._ratios.append((seconds, ratio))


def _mean_ratio(ratios: Sequence[tuple[float, float]]) -> float:
    """All seconds over those that were needed."""
    needed = sum(seconds / ratio for seconds, ratio in ratios)
    return sum(seconds for seconds, _ in ratios) / needed if needed else math.nan


def _checked(rules: Rules) -> Rules:
    if not 0 <= rules.gain < 1:
        raise InputError("rules.gain", rules.gain, "a share from 0 to below 1")
    positive_int("rules.patience", rules.patience)
    positive_int("rules.refresh", rules.refresh)
    return rules
