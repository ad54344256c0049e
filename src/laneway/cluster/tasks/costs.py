"""What a task would take in each place: from what it declares, what it took, and the load of ranks and links. No torch here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from laneway.cluster.tasks.load import LoadRow
from laneway.cluster.tasks.members import Members, Place
from laneway.cluster.tasks.task import Task

__all__ = ["Costs", "Seen"]

SHARE = 0.5
"""Of a new measurement in a running mean."""
CALM = 0.1
"""Share of the mean by which a quiet measurement may become a noisy one at once."""


@dataclass(frozen=True)
class Seen:
    """What a task took in a place.

    Attributes:
        own: seconds beyond what was declared, a running mean.
        took: seconds, a running mean.
        noise: how far measurements lie from it, a running mean.
        best: the least that ``took`` ever was.
        step: of the last measurement.
    """

    own: float
    took: float
    noise: float
    best: float
    step: int

    def then(self, own: float, took: float, step: int, old: bool) -> Seen:
        """With another measurement; ``old``: it replaces what was measured long ago."""
        if old:
            return Seen(own, took, self.noise, min(self.best, took), step)
        far = min(abs(took - self.took), 2 * self.noise + CALM * self.took)  # a jump is no noise
        mean, noise = _mean(self.took, took), _mean(self.noise, far)
        return Seen(_mean(self.own, own), mean, noise, min(self.best, mean), step)


class Costs:
    """Seconds of each task in each place.

    A place takes the declared seconds of work × how slow its slowest rank is now + the bytes it sends or fetches × what a byte
    takes now at their level + what was learned: what measured seconds leave over. (Only work that is declared gets slower with
    the rank: of what is measured, nobody knows whether it was work or waiting.) A place that was never measured is taken to be
    like the others of its variant.

    Args:
        tasks: what there is to run.
        members: ranks and levels.
        links: bytes per second of a level, where they are known before anything is measured.
        stray: factor on places beyond the level that a task prefers.
        refresh: after so many steps a measurement is old, and the next one replaces it.
    """

    def __init__(self, tasks: Sequence[Task], members: Members, links: Mapping[str, float], stray: float, refresh: int) -> None:
        self.tasks, self.members, self.stray, self.refresh = tuple(tasks), members, stray, refresh
        self.busy = [0.0] * members.world
        self.slow = [1.0] * members.world
        byte = [1 / links[name] if name in links else 0.0 for name in members.names]
        self.wire = [list(byte) for _ in range(members.world)]
        self.seen: list[dict[int, Seen]] = [{} for _ in tasks]

    def learn(self, rows: Sequence[LoadRow], step: int) -> None:
        """Take in what all ranks have measured in ``step``."""
        for rank, row in enumerate(rows):
            self.busy[rank] = _mean(self.busy[rank], row.busy)
            self.slow[rank] = _mean(self.slow[rank], row.slow)
            self.wire[rank] = [_mean(old, new) for old, new in zip(self.wire[rank], row.wire, strict=True)]
        for number, task in enumerate(self.tasks):
            told = [row.tasks[number] for row in rows if not any(map(math.isnan, row.tasks[number]))]
            for index in sorted({int(place) for _, place in told}):
                took = max(seconds for seconds, place in told if int(place) == index)
                self._note(number, index, task.places[index], took, step)

    def known(self, number: int, index: int) -> bool:
        """Whether there is anything to go by for a place, be it another place of the same variant."""
        return self.tasks[number].declared or self._own(number, index) is not None

    def seconds(self, number: int, index: int) -> float:
        """The prediction for task ``number`` in its place ``index``."""
        task = self.tasks[number]
        place = task.places[index]
        known = task.seconds * self._slow(place) + self._wire(task, place)
        return max(0.0, known + (self._own(number, index) or 0.0)) * self._factor(number, index)

    def strays(self, number: int, index: int) -> bool:
        """Whether a place lies beyond the level that its task prefers."""
        task = self.tasks[number]
        if not task.level:
            return False
        ranks = task.places[index].ranks if task.home is None else (task.home, *task.places[index].ranks)
        return self.members.span(ranks) > self.members.level(task.level)

    def state_dict(self) -> dict[str, Any]:
        """All that was learned; the same on every rank."""
        seen = [{str(index): list(astuple(seen)) for index, seen in places.items()} for places in self.seen]
        return {"busy": list(self.busy), "slow": list(self.slow), "wire": [list(row) for row in self.wire], "seen": seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Undo of ``state_dict``."""
        self.busy, self.slow = list(state["busy"]), list(state["slow"])
        self.wire = [list(row) for row in state["wire"]]
        self.seen = [
            {int(index): Seen(values[0], values[1], values[2], values[3], int(values[4])) for index, values in places.items()}
            for places in state["seen"]
        ]

    def _note(self, number: int, index: int, place: Place, took: float, step: int) -> None:
        task, old = self.tasks[number], self.seen[number].get(index)
        own = took - self._wire(task, place) - task.seconds * self._slow(place)
        new = Seen(own, took, 0.0, took, step) if old is None else old.then(own, took, step, step - old.step > self.refresh)
        self.seen[number][index] = new

    def last(self, number: int, index: int) -> float:
        """The step in which a place was last measured; long ago where it never was."""
        seen = self.seen[number].get(index)
        return -math.inf if seen is None else seen.step

    def noise(self, number: int, index: int) -> float:
        """How far measurements of a place lie from their mean, in seconds."""
        seen = self.seen[number].get(index)
        return 0.0 if seen is None else seen.noise

    def least(self, number: int) -> float:
        """The least seconds that a task took anywhere."""
        return min((seen.best for seen in self.seen[number].values()), default=math.inf)

    def best(self, number: int, index: int) -> float:
        """The least seconds that a place took, or any that is like it, as predictions count them; infinite: nothing is known."""
        return min((seen.best for seen in self._alike(number, index)), default=math.inf) * self._factor(number, index)

    def _factor(self, number: int, index: int) -> float:
        return self.stray if self.strays(number, index) else 1.0

    def _own(self, number: int, index: int) -> float | None:
        found = [seen.own for seen in self._alike(number, index)]
        return sum(found) / len(found) if found else None

    def _alike(self, number: int, index: int) -> list[Seen]:
        """What there is to go by: the place's own measurements, else those of the places of the same variant."""
        places, seen = self.tasks[number].places, self.seen[number]
        if index in seen:
            return [seen[index]]
        return [found for other, found in sorted(seen.items()) if places[other].variant == places[index].variant]

    def _slow(self, place: Place) -> float:
        return max(self.slow[rank] for rank in place.ranks)

    def _wire(self, task: Task, place: Place) -> float:
        """Seconds of its messages: those of its variant one after the other, and the way of its data to the furthest rank."""
        levels = task.traffic.get(place.variant, {})
        sent = sum(
            nbytes * max(self.wire[rank][self.members.level(name)] for rank in place.ranks) for name, nbytes in levels.items()
        )
        if task.home is None or not task.nbytes:
            return sent
        return sent + task.nbytes * max(self._way(task.home, rank) for rank in place.ranks)

    def _way(self, home: int, rank: int) -> float:
        level = self.members.between(home, rank)
        return 0.0 if level < 0 else max(self.wire[home][level], self.wire[rank][level])


def _mean(old: float, new: float) -> float:
    return old if math.isnan(new) else old + SHARE * (new - old)
