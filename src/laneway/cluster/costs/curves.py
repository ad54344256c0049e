"""Seconds of a transfer as a function of its bytes, fitted to what was measured."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from laneway.core import InputError

__all__ = ["Curve"]

KNEE = 1 << 18
"""Bytes from which on a transfer is taken to be a start and a rate; below, latency and the scheduler bend the curve."""


@dataclass(frozen=True)
class Curve:
    """α + β·bytes from the knee on; straight lines between the measured points below it.

    Attributes:
        start: α, seconds.
        per_byte: β, seconds per byte.
        points: (bytes, seconds) below the knee, ascending; none: α + β·bytes everywhere.

    Raises:
        InputError: a negative number.
    """

    start: float
    per_byte: float
    points: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        for name, value in (("start", self.start), ("per_byte", self.per_byte)):
            if not 0 <= value < float("inf"):
                raise InputError(f"curve.{name}", value, "a number ≥ 0")
        object.__setattr__(self, "points", tuple(sorted((float(size), float(seconds)) for size, seconds in self.points)))

    @classmethod
    def fit(cls, samples: Sequence[tuple[float, float]], knee: float = KNEE) -> Curve:
        """From (bytes, seconds); errors count relative to the seconds. With one size at the knee or above, α is 0.

        Raises:
            InputError: no sample, or times that are not above 0.
        """
        if not samples or any(size < 0 or not 0 < seconds < float("inf") for size, seconds in samples):
            raise InputError("samples", list(samples)[:4], "(bytes ≥ 0, seconds > 0), one or more")
        large = [pair for pair in samples if pair[0] >= knee] or [max(samples)]
        start, per_byte = _weighted_line(large)
        return cls(start, per_byte, tuple(pair for pair in samples if pair[0] < knee))

    def seconds(self, nbytes: float) -> float:
        """Of so many bytes; 0 for none."""
        if nbytes <= 0:
            return 0.0
        line = self.start + self.per_byte * nbytes
        if not self.points:
            return line
        sizes = [size for size, _ in self.points]
        place = bisect_right(sizes, nbytes)
        if place == len(sizes):  # between the last point and the knee, the line must not lie below it
            return max(line, self.points[-1][1])
        if place == 0:
            return self.points[0][1]
        (low, before), (high, after) = self.points[place - 1], self.points[place]
        return before + (after - before) * (nbytes - low) / (high - low)

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {"start": self.start, "per_byte": self.per_byte, "points": [list(point) for point in self.points]}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Curve:
        """Undo of `to_dict`.

        Raises:
            InputError: something else.
        """
        try:
            return cls(float(given["start"]), float(given["per_byte"]), tuple((float(a), float(b)) for a, b in given["points"]))
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError("curve", given, "start, per_byte and points") from error


def _weighted_line(samples: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """α and β ≥ 0 that make Σ (1 − (α + β·bytes) / seconds)² least."""
    xx = sum((size / seconds) ** 2 for size, seconds in samples)
    x1 = sum(size / seconds**2 for size, seconds in samples)
    ones = sum(1 / seconds**2 for _, seconds in samples)
    xy, y1 = sum(size / seconds for size, seconds in samples), sum(1 / seconds for _, seconds in samples)
    determinant = ones * xx - x1 * x1
    if len({size for size, _ in samples}) > 1 and determinant > 0:
        start, per_byte = (y1 * xx - x1 * xy) / determinant, (ones * xy - x1 * y1) / determinant
        if start >= 0 and per_byte >= 0:
            return start, per_byte
        if per_byte < 0:
            return y1 / ones, 0.0
    return 0.0, xy / xx if xx else 0.0
