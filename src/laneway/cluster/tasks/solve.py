"""The best place for each of several tasks: exact, small, and the same on every machine. No torch here.

Ranks work side by side, so what counts first is when the busiest one is done; of equal plans the one with least work is taken,
and of equal ones the first. This is scheduling on unrelated machines (Lenstra, Shmoys, Tardos 1990) with tasks that may need
several machines at once; depth-first branch and bound with a bound from the work that is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["NODES", "Option", "Solution", "solve", "value"]

NODES = 20_000
"""Branches that are looked at; beyond them the best one so far is taken, on every rank the same."""


@dataclass(frozen=True)
class Option:
    """One place of a task: so many seconds on each of its ranks."""

    seconds: float
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Solution:
    """Indices of options, one for each task.

    Attributes:
        picks: index of the option of each task.
        end: seconds until the busiest rank is done.
        work: seconds of all tasks, added up.
        exact: whether no better plan exists.
    """

    picks: tuple[int, ...]
    end: float
    work: float
    exact: bool = True


def value(tasks: Sequence[Sequence[Option]], busy: Sequence[float], picks: Sequence[int]) -> Solution:
    """What a given plan comes to."""
    loads = list(busy)
    chosen = [options[pick] for options, pick in zip(tasks, picks, strict=True)]
    for option in chosen:
        for rank in option.ranks:
            loads[rank] += option.seconds
    return Solution(tuple(picks), max(loads), sum(option.seconds for option in chosen))


def solve(tasks: Sequence[Sequence[Option]], busy: Sequence[float], nodes: int = NODES) -> Solution:
    """The plan that ends first.

    Args:
        tasks: the options of each task, at least one.
        busy: seconds that each rank works anyway.
        nodes: branches that are looked at.
    """
    return _Search(tasks, busy, nodes).best()


class _Search:
    def __init__(self, tasks: Sequence[Sequence[Option]], busy: Sequence[float], nodes: int) -> None:
        self.tasks, self.loads, self.nodes = tasks, list(busy), nodes
        least = [min(option.seconds for option in options) for options in tasks]
        area = [min(option.seconds * len(option.ranks) for option in options) for options in tasks]
        self.order = sorted(range(len(tasks)), key=lambda task: (-least[task], task))
        self.left = [0.0] * (len(tasks) + 1)
        self.area = [0.0] * (len(tasks) + 1)
        for at in reversed(range(len(tasks))):
            self.left[at] = self.left[at + 1] + least[self.order[at]]
            self.area[at] = self.area[at + 1] + area[self.order[at]]
        self.picks = [0] * len(tasks)
        self.found: Solution | None = None
        self.goal = (float("inf"), float("inf"))

    def best(self) -> Solution:
        self._descend(0, max(self.loads), 0.0)
        assert self.found is not None
        exact = self.nodes > 0
        picks = self.found.picks
        return Solution(picks, *self.goal, exact)

    def _descend(self, at: int, end: float, work: float) -> None:
        if at == len(self.order):
            if self._better(end, work):
                self.goal, self.found = (end, work), Solution(tuple(self.picks), end, work)
            return
        task = self.order[at]
        ends = [max(end, max(self.loads[rank] for rank in option.ranks) + option.seconds) for option in self.tasks[task]]
        for index in sorted(range(len(ends)), key=lambda index: (ends[index], self.tasks[task][index].seconds, index)):
            option = self.tasks[task][index]
            bound = max(ends[index], self._mean(option, at + 1))
            if self.found is not None and (self.nodes <= 0 or not self._better(bound, work + option.seconds + self.left[at + 1])):
                continue
            self.nodes -= 1
            self.picks[task] = index
            before = [self.loads[rank] for rank in option.ranks]
            for rank in option.ranks:
                self.loads[rank] += option.seconds
            self._descend(at + 1, ends[index], work + option.seconds)
            for rank, load in zip(option.ranks, before, strict=True):
                self.loads[rank] = load

    def _mean(self, option: Option, at: int) -> float:
        """No plan ends before all ranks together have done what is left."""
        return (sum(self.loads) + option.seconds * len(option.ranks) + self.area[at]) / len(self.loads)

    def _better(self, end: float, work: float) -> bool:
        """By more than rounding, so that of equal plans the first is kept."""
        slack = 1e-12 * max(1e-9, abs(self.goal[0])) if self.found else 0.0
        if abs(end - self.goal[0]) <= slack:
            return work < self.goal[1] - 1e-12 * max(1e-9, self.goal[1])
        return end < self.goal[0]
