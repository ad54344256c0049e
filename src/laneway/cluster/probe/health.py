"""States of a level of the network: up, degraded, down, and when one follows another. No torch here.

What is observed is a ratio: seconds over those of the same transfer in good times. Two thresholds lie apart, and each change
needs several observations in a row. A level that relapses soon after it recovered has to be well for twice as long the next time,
so that whatever the noise, n observations bring O(log n) changes.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from laneway.core import InputError, choice, positive_int

__all__ = ["DEGRADED", "DOWN", "STATES", "UP", "Baseline", "Change", "Health", "Rules"]

USUAL, SPREAD = 0.8, 1.35
"""Most transfers take no longer than this quantile; where it is further above the median, the link is a noisy one."""
UP, DEGRADED, DOWN = STATES = ("up", "degraded", "down")


@dataclass(frozen=True)
class Rules:
    """When a state gives way to another.

    Attributes:
        degraded, restored: ratios from which on a level counts as slow, and up to which as well again.
        down: ratio from which on nothing is expected of it any more.
        severe: ratio of which one observation is enough.
        confirm: observations in a row before it is degraded or down.
        recover: observations in a row before it is up again; doubled with each relapse.
        worse: factor by which a degraded level's ratio must move before that is a change of its own.
        forget: observations after a recovery from which on a relapse is none.

    Raises:
        InputError: a number out of range, or thresholds that don't ascend.
    """

    degraded: float = 2.0
    restored: float = 1.5
    down: float = 200.0
    severe: float = 5.0
    confirm: int = 2
    recover: int = 3
    worse: float = 2.0
    forget: int = 512

    def __post_init__(self) -> None:
        bounds = (1.0, self.restored, self.degraded, self.severe, self.down)
        if not all(math.isfinite(bound) for bound in bounds) or any(a >= b for a, b in pairwise(bounds)):
            raise InputError("rules", bounds[1:], "restored < degraded < severe < down, all above 1")
        if not 1 < self.worse < math.inf:
            raise InputError("rules.worse", self.worse, "a factor above 1")
        for name in ("confirm", "recover", "forget"):
            positive_int(f"rules.{name}", getattr(self, name))


@dataclass(frozen=True)
class Change:
    """A state that gave way to another; ``degraded`` to ``degraded`` where it got much slower or faster.

    Attributes:
        before, after: of `STATES`.
        ratio: how much slower than in good times; 1 after a recovery.
    """

    before: str
    after: str
    ratio: float


class Health:
    """One level's state."""

    def __init__(self, rules: Rules | None = None) -> None:
        self.rules = rules or Rules()
        self.state, self.ratio = UP, 1.0
        self._bad: deque[float] = deque(maxlen=self.rules.confirm)
        self._good: list[float] = []
        self._relapses, self._since = 0, self.rules.forget

    def observe(self, ratio: float, *, sure: bool = True) -> Change | None:
        """Seconds over those of good times. NaN says nothing.

        Args:
            ratio: what was seen.
            sure: whether a severe ratio is enough by itself.

        Returns: the change that follows from it, if one does.
        """
        if math.isnan(ratio):
            return None
        self._since += 1
        worse = self.rules.degraded if self.state == UP else self.ratio * self.rules.worse
        better = self.rules.restored if self.state == DOWN else max(self.rules.restored, self.ratio / self.rules.worse)
        if ratio >= worse and self.state != DOWN:
            return self._slower(ratio, sure)
        self._bad.clear()
        if self.state != UP and ratio <= better:
            return self._faster(ratio)
        self._good.clear()
        return None

    def _slower(self, ratio: float, sure: bool) -> Change | None:
        self._good.clear()
        self._bad.append(ratio)
        if len(self._bad) < self.rules.confirm and not (sure and self.state == UP and ratio >= self.rules.severe):
            return None
        if self._since < self.rules.forget:
            self._relapses += 1
        elif self.state == UP:
            self._relapses = 0
        found = statistics.median(self._bad)
        return self._go(DOWN if min(self._bad) >= self.rules.down and len(self._bad) == self.rules.confirm else DEGRADED, found)

    def _faster(self, ratio: float) -> Change | None:
        self._good.append(ratio)
        if len(self._good) < self.rules.recover * 2**self._relapses:
            return None
        found = statistics.median(self._good)
        self._since = 0
        return self._go(UP, 1.0) if found <= self.rules.restored else self._go(DEGRADED, found)

    def _go(self, state: str, ratio: float) -> Change:
        before, self.state, self.ratio = self.state, state, min(ratio, self.rules.down)
        self._bad.clear()
        self._good.clear()
        return Change(before, state, self.ratio)

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        counts = {"bad": list(self._bad), "good": list(self._good), "relapses": self._relapses, "since": self._since}
        return {"state": self.state, "ratio": self.ratio} | counts

    def load(self, given: Mapping[str, Any]) -> None:
        """Undo of `to_dict`.

        Raises:
            InputError: another state than there is.
        """
        self.state, self.ratio = choice("state", given["state"], STATES), float(given["ratio"])
        self._bad.clear()
        self._bad.extend(given["bad"])
        self._good = list(given["good"])
        self._relapses, self._since = int(given["relapses"]), int(given["since"])


class Baseline:
    """What a transfer takes in good times: the median of what it took lately, or more where that varies widely.

    Args:
        window: observations that count.
        learn: observations before there is a ratio.
    """

    def __init__(self, window: int = 33, learn: int = 5) -> None:
        self.learn = positive_int("learn", learn)
        self._seen: deque[float] = deque(maxlen=positive_int("window", window, learn))

    @property
    def known(self) -> bool:
        """Whether there are enough observations."""
        return len(self._seen) >= self.learn

    @property
    def usual(self) -> float:
        """What it takes in good times; NaN where that isn't known."""
        if not self.known:
            return math.nan
        seen = sorted(self._seen)
        return max(statistics.median(seen), seen[int(USUAL * (len(seen) - 1))] / SPREAD)

    def ratio(self, value: float) -> float:
        """Of a value to what it takes in good times; NaN where either is unknown."""
        return value / self.usual

    def add(self, value: float) -> None:
        """One more, of good times; NaN, infinity and 0 are left out."""
        if 0 < value < math.inf:
            self._seen.append(value)

    def values(self) -> list[float]:
        """What counts now."""
        return list(self._seen)

    def load(self, values: Iterable[float]) -> None:
        """Undo of `values`."""
        self._seen.clear()
        self._seen.extend(values)
