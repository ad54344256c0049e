"""Passive probe: what the run's own collectives take, without a byte of its own. No torch here.

A phase that waits for a late member takes long on all members but the late one, so of a group its fastest member counts: that is
the transfer. Messages of a step differ in size, so of a rank's phases at a level the middle one of the large counts.
"""

from __future__ import annotations

import math
import statistics
import threading
from collections.abc import Callable, Sequence
from typing import Any

from laneway.cluster.probe.health import Baseline
from laneway.cluster.reduce.places import Places

__all__ = ["GroupRates", "PhaseTimer"]

LARGE = 0.5
"""Share of the largest message's bytes from which on one counts."""


class PhaseTimer:
    """An observer of a reducer: seconds per byte of its phases, level by level.

    Args:
        levels: of the groups; collectives over all ranks at once count as one more.
        disturbed: whether something else was on the links after a time of `time.perf_counter`.
    """

    def __init__(self, levels: int, disturbed: Callable[[float], bool] | None = None) -> None:
        self.levels, self.disturbed = levels, disturbed
        self._seen: list[list[tuple[int, float]]] = [[] for _ in range(levels + 1)]
        self._disturbed = False
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """Numbers in a row."""
        return self.levels + 2

    def __call__(self, timing: Any) -> None:
        """A `Timing`; from any thread."""
        if timing.nbytes > 0:
            disturbed = self.disturbed is not None and self.disturbed(timing.started)
            with self._lock:
                self._disturbed |= disturbed
                self._seen[timing.level].append((timing.nbytes, timing.seconds))  # level −1 is the last

    def take(self) -> list[float]:
        """Since the last call: seconds per byte at each level and of flat collectives (NaN: there were none); 1 if disturbed."""
        with self._lock:
            seen, self._seen = self._seen, [[] for _ in range(self.levels + 1)]
            disturbed, self._disturbed = self._disturbed, False
        return [*map(_middle, seen), float(disturbed)]


class GroupRates:
    """Ratios of all groups to their own good times, from what all ranks saw.

    Args:
        places: the groups.
    """

    def __init__(self, places: Places) -> None:
        self.groups = [[group for group in groups if len(group) > 1] for groups in places.groups]
        self.groups.append([tuple(places.order)] if len(places.order) > 1 else [])
        self.baselines: dict[tuple[int, tuple[int, ...]], Baseline] = {
            (level, group): Baseline() for level, groups in enumerate(self.groups) for group in groups
        }

    def ratios(self, rows: Sequence[Sequence[float]]) -> list[dict[tuple[int, ...], float]]:
        """By level (the last: flat collectives): each group's seconds per byte over those of good times, where both are known.

        Args:
            rows: `PhaseTimer.take` of every rank.
        """
        found: list[dict[tuple[int, ...], float]] = []
        for level, values in enumerate(self._values(rows)):
            at = {group: self.baselines[level, group].ratio(value) for group, value in values.items()}
            found.append({group: ratio for group, ratio in at.items() if not math.isnan(ratio)})
        return found

    def learn(self, rows: Sequence[Sequence[float]], levels: Sequence[int]) -> None:
        """These levels had good times."""
        values = self._values(rows)
        for level in levels:
            for group, value in values[level].items():
                self.baselines[level, group].add(value)

    def _values(self, rows: Sequence[Sequence[float]]) -> list[dict[tuple[int, ...], float]]:
        found = []
        for level, groups in enumerate(self.groups):
            at = {group: [rows[rank][level] for rank in group if not math.isnan(rows[rank][level])] for group in groups}
            found.append({group: min(values) for group, values in at.items() if values})
        return found

    def to_list(self) -> list[list[float]]:
        """As JSON can hold it."""
        return [baseline.values() for baseline in self.baselines.values()]

    def load(self, given: Sequence[Sequence[float]]) -> None:
        """Undo of `to_list`."""
        for baseline, values in zip(self.baselines.values(), given, strict=True):
            baseline.load(values)


def _middle(phases: Sequence[tuple[int, float]]) -> float:
    if not phases:
        return math.nan
    least = LARGE * max(nbytes for nbytes, _ in phases)
    return statistics.median(seconds / nbytes for nbytes, seconds in phases if nbytes >= least)
