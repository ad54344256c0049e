"""Axes: from a range of values to pixels, with ticks at round numbers and labels a person would write."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

# Positive data that span more than this factor are drawn on a logarithmic axis: below it a linear one reads better.
LOG_FROM_RATIO = 30.0
# Axes end here: beyond, a value is drawn at the end, and no arithmetic on the axis can overflow.
LARGEST, SMALLEST = 1e100, 1e-100
SI_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


@dataclass(frozen=True)
class Scale:
    """Maps [low, high] to the pixels [start, stop], linearly or by logarithm."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Pixel of a value; values outside the range land on its ends."""
        value = min(max(float(value), self.low), self.high)
        if self.log:
            share = (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.stop - self.start)

    def ticks(self, count: int = 5) -> list[float]:
        """About ``count`` round values inside the range."""
        return log_ticks(self.low, self.high, count) if self.log else linear_ticks(self.low, self.high, count)


def make_scale(
    values: Iterable[np.ndarray],
    pixels: tuple[float, float],
    log: bool | None = None,
    low: float | None = None,
    high: float | None = None,
    least_span: float = 0.0,
) -> Scale:
    """A scale that holds all finite ``values`` with a little air.

    Args:
        values: arrays; what is not finite is ignored.
        pixels: where the low and the high end are drawn.
        log: force the axis; None chooses a logarithm where positive data span more than ``LOG_FROM_RATIO``.
        low, high: ends that must lie inside the axis (0 for a rate, 1 for a gain).
        least_span: smallest range shown, so that rounding noise isn't blown up to fill the picture. On a logarithmic axis
            it counts from the low end.
    """
    data = np.concatenate([np.empty(0), *(array[np.isfinite(array)] for array in values)]).clip(-LARGEST, LARGEST)
    positive = bool(np.all(data > 0))
    log = positive and (log if log is not None else len(data) > 0 and data.max() > LOG_FROM_RATIO * data.min())
    if log:
        data = data.clip(SMALLEST)
    ends = [v for v in (low, high) if v is not None and (v > 0 or not log)]
    pool = np.concatenate([data, np.array(ends, dtype=float)])
    if not len(pool):
        return Scale(0.0, 1.0, *pixels)
    # Rounding beyond an end that was asked for (a gain of 1 − 1e-9) does not move it.
    slack = 0.01 * least_span
    bottom = low if low in ends and low - pool.min() <= slack else float(pool.min())
    top = high if high in ends and pool.max() - high <= slack else float(pool.max())
    if log:
        top = max(top, bottom + least_span, bottom * 1.05)
        air = (top / bottom) ** 0.04
        return Scale(bottom / air, top * air, *pixels, log=True)
    missing = max(least_span, 1e-9 * max(abs(bottom), abs(top)), 1e-300) - (top - bottom)
    if missing > 0:
        # A missing part of the range is added where the data may go: not beyond an end that was asked for.
        above = 1.0 if bottom == low else 0.0 if top == high else 0.5
        top, bottom = top + above * missing, bottom - (1 - above) * missing
    air = 0.05 * (top - bottom)
    # An end that was asked for (a floor of 0, say) stays an end.
    return Scale(bottom if bottom == low else bottom - air, top if top == high else top + air, *pixels)


def linear_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten inside [low, high]: the step that gives nearest to ``count`` of them."""
    span = high - low
    if not (span > 0 and math.isfinite(span)):
        return [low]
    power = 10.0 ** math.floor(math.log10(span / count))
    step = min((power * m for m in (1, 2, 5, 10)), key=lambda s: abs(span / s - count))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    # Fifteen digits drop the rounding of k · step; ticks that they make equal lie closer than floats of this size resolve.
    return list(dict.fromkeys(0.0 if k == 0 else float(f"{k * step:.15g}") for k in range(first, last + 1)))


def log_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Powers of ten inside [low, high] (every k-th where there are many), with 2 and 5 between where there are few."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    decades = last - first + 1
    if decades >= 3:
        stride = max(1, round(decades / count))
        return [float(f"1e{k}") for k in range(first, last + 1) if k % stride == 0]
    fine = [float(f"{m}e{k}") for k in range(first - 1, last + 1) for m in (1, 2, 5)]
    found = [value for value in fine if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]
    return found if len(found) >= 3 else linear_ticks(low, high, count)


def tick_label(value: float, step: float | None = None) -> str:
    """A tick's text: plain digits near 1, an SI prefix from a thousand on.

    Args:
        value: the tick.
        step: distance to the next tick on a linear axis; all labels get the decimals it needs.
    """
    if value == 0:
        return "0"
    if not 1e-3 <= abs(value) < 1e18:
        return scientific(value)
    factor, prefix = next(((f, p) for f, p in SI_PREFIXES if abs(value) >= f), (1.0, ""))
    if step is None:
        return (f"{value / factor:.4g}" + prefix).replace("-", "−")
    text = f"{value / factor:.{max(0, -math.floor(math.log10(step / factor) + 1e-9))}f}"
    if factor > 1 and "." in text:
        text = text.rstrip("0").rstrip(".")
    return (text + prefix).replace("-", "−")


def scientific(value: float) -> str:
    """``2e−4``: short, and the way learning rates are written."""
    mantissa, exponent = f"{value:.3e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}".replace("-", "−")


def tick_labels(ticks: list[float], log: bool) -> list[str]:
    """Labels of an axis' ticks, all in one notation."""
    largest = max((abs(value) for value in ticks), default=0.0)
    if log and not 1e-3 < min(ticks, default=1.0) <= largest < 1e6:
        return ["1" if value == 1 else scientific(value) for value in ticks]
    if not log and 0 < largest < 0.01:
        return ["0" if value == 0 else scientific(value) for value in ticks]
    step = None if log or len(ticks) < 2 else min(b - a for a, b in pairwise(ticks))
    return [tick_label(value, step) for value in ticks]
