"""A number of the catalogue or of a formula, with where it comes from."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Figure", "Interval"]


@dataclass(frozen=True)
class Figure:
    """One constant: its value in SI units (seconds, bytes, bytes per second, FLOP/s, watts, joules) and its source."""

    value: float
    unit: str
    source: str


@dataclass(frozen=True)
class Interval:
    """A predicted quantity: the likely value, and bounds that most measurements should fall between."""

    value: float
    low: float
    high: float

    def __add__(self, other: Interval) -> Interval:
        return Interval(self.value + other.value, self.low + other.low, self.high + other.high)

    def scaled(self, factor: float) -> Interval:
        """All three times a factor ≥ 0."""
        return Interval(self.value * factor, self.low * factor, self.high * factor)
