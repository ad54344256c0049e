"""λ of the curvature gate over a run: fixed, linear, or chosen by a controller from what the run shows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from laneway.connections.gates import strength_in_range
from laneway.core import InputError, collect, positive_int, problems_of, real


def linear_strength(start: float, final: float | None = None, steps: int | None = None) -> Callable[[int], float]:
    """λ of a step: from ``start`` at step 0 linearly to ``final`` at step ``steps``, and that from there on.

    Raises:
        InputError: λ outside [0, 1], or a ``final`` without ``steps``.
    """
    first = strength_in_range("strength", start)
    if final is None:
        return lambda step: first
    last = strength_in_range("final", final)
    if steps is None:
        raise InputError("steps", steps, "an integer ≥ 1, with a final strength")
    length = positive_int("steps", steps)
    return lambda step: first + (last - first) * min(max(step, 0) / length, 1.0)


@dataclass(frozen=True)
class AutoSettings:
    """How the controller behaves. Averages are exponential; ``fast`` and ``slow`` are their lengths in steps."""

    start: float = 0.3
    """λ at the first step."""
    low: float = 0.0
    """Smallest λ."""
    high: float = 1.0
    """Largest λ."""
    fast: int = 8
    """Steps of the short averages."""
    slow: int = 64
    """Steps of the long averages, and of the wait before the first change."""
    rise: float = 0.1
    """Growth of κ, short average over long minus one, that counts as evidence in full."""
    spike: float = 3.0
    """Gradient norm, over its long average, that counts as evidence in full."""
    climb: float = 0.05
    """Growth of the loss, short average over long minus one, that counts as evidence in full."""
    raise_at: float = 1.0
    """Sum of the three pieces of evidence (each from 0 to 1) from which λ rises."""
    lower_at: float = 0.25
    """Sum under which λ falls; between the two it stays: hysteresis."""
    wait: int = 8
    """Steps for which the sum must stay on one side, and between two changes."""
    up: float = 0.1
    """A rise of λ."""
    down: float = 0.02
    """A fall of λ."""

    def check(self, prefix: str = "auto") -> None:
        """Raise InputError for the first field of another type or out of range."""
        for problem in problems_of(self, f"{prefix}.", lambda sound: collect([lambda: sound._in_range(prefix)])):
            raise problem

    def _in_range(self, prefix: str) -> None:
        for name in ("start", "low", "high"):
            strength_in_range(f"{prefix}.{name}", getattr(self, name))
        if not self.low <= self.start <= self.high:
            raise InputError(f"{prefix}.start", self.start, f"a number from low = {self.low} to high = {self.high}")
        for name in ("fast", "slow", "wait"):
            positive_int(f"{prefix}.{name}", getattr(self, name))
        if self.slow <= self.fast:
            raise InputError(f"{prefix}.slow", self.slow, f"more steps than fast = {self.fast}")
        for name in ("rise", "climb", "raise_at", "lower_at", "up", "down"):
            real(f"{prefix}.{name}", getattr(self, name), lambda given: given > 0, "a number > 0")
        real(f"{prefix}.spike", self.spike, lambda spike: spike > 1, "a number > 1")
        if self.lower_at >= self.raise_at:
            raise InputError(f"{prefix}.lower_at", self.lower_at, f"a number under raise_at = {self.raise_at}")


class AutoStrength:
    """λ chosen from the trend of curvature, spikes of the gradient norm and the slope of the loss.

    ``see`` takes the three numbers of a step and ``value`` is λ of the next. It is a function of those numbers alone, so ranks
    that are given the same ones agree. Evidence of trouble is the sum of three parts between 0 and 1: how much the short average
    of κ stands above its long one, how far the norm is above its long average (fading over ``fast`` steps), how much the short
    average of the loss stands above its long one. A number that is not finite counts as a spike and enters no average.

    Raises:
        InputError: a setting out of range.
    """

    def __init__(self, settings: AutoSettings | None = None) -> None:
        self.settings = settings or AutoSettings()
        self.settings.check()
        self.value = float(self.settings.start)
        self.seen = self.above = self.below = 0
        self.spike = 0.0
        self.averages: dict[str, float] = {}

    def see(self, curvature: float | None, grad_norm: float, loss: float) -> float:
        """Take in a step (``curvature`` None: not measured yet) and return λ of the next."""
        s = self.settings
        evidence = self._spiked(grad_norm, finite=math.isfinite(loss))
        evidence += _part(self._growth("curvature", curvature), s.rise) + _part(self._growth("loss", loss), s.climb)
        self.seen += 1
        self.above = self.above + 1 if evidence >= s.raise_at else 0
        self.below = self.below + 1 if evidence < s.lower_at else 0
        if self.seen > s.slow and self.above >= s.wait:
            self._move(s.up)
        elif self.seen > s.slow and self.below >= s.wait:
            self._move(-s.down)
        return self.value

    def state_dict(self) -> dict[str, Any]:
        """All that it remembers."""
        counts = {"seen": self.seen, "above": self.above, "below": self.below}
        return {"value": self.value, "spike": self.spike, "averages": dict(self.averages), **counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo of ``state_dict``."""
        self.value, self.spike = float(state["value"]), float(state["spike"])
        self.averages = {name: float(value) for name, value in state["averages"].items()}
        self.seen, self.above, self.below = (int(state[name]) for name in ("seen", "above", "below"))

    def _move(self, by: float) -> None:
        self.value = min(max(self.value + by, self.settings.low), self.settings.high)
        self.above = self.below = 0

    def _spiked(self, norm: float, finite: bool) -> float:
        """Evidence of the gradient norm: in full at a spike, fading after it."""
        usual = self.averages.get("norm")
        finite = finite and math.isfinite(norm)
        now = 1.0 if not finite else 0.0 if usual is None else _part(norm / max(usual, 1e-30) - 1, self.settings.spike - 1)
        self.spike = max(now, self.spike * (1 - 1 / self.settings.fast))
        if finite:
            ceiling = norm if usual is None else min(norm, self.settings.spike * usual)  # a spike must not become the usual
            self._average("norm", ceiling, self.settings.slow)
        return self.spike

    def _growth(self, name: str, value: float | None) -> float:
        """Short average over long average, minus one; 0 before the first value."""
        if value is not None and math.isfinite(value):
            self._average(f"{name}_fast", value, self.settings.fast)
            self._average(f"{name}_slow", value, self.settings.slow)
        slow = self.averages.get(f"{name}_slow", 0.0)
        return self.averages[f"{name}_fast"] / slow - 1 if slow > 0 else 0.0

    def _average(self, name: str, value: float, steps: int) -> None:
        """Exponential, with the plain mean of what came so far while there were fewer values than ``steps``."""
        count = self.averages[f"{name}_count"] = min(self.averages.get(f"{name}_count", 0.0) + 1, steps)
        old = self.averages.get(name, value)
        self.averages[name] = old + (value - old) / count


def _part(growth: float, full: float) -> float:
    """0 for no growth, 1 from ``full`` on."""
    return min(max(growth / full, 0.0), 1.0)
