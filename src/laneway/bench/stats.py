"""Medians, quartiles and intervals of repeated measurements. No torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 2000
SEED = 0  # of the bootstrap: the same measurements give the same interval

# 97.5 % quantile of Student's t for 1 … 30 degrees of freedom; beyond that the normal one.
T_QUANTILE = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True)
class Interval:
    """A figure with a 95 % interval around it; ``low == high == value`` for what is counted, not sampled."""

    value: float
    low: float
    high: float

    @classmethod
    def exact(cls, value: float) -> Interval:
        """A counted figure."""
        return cls(value, value, value)

    def columns(self, name: str) -> dict[str, float]:
        """As a row holds it: ``name``, ``name_low`` and ``name_high``; ``parts`` reads it back."""
        return {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}

    def as_json(self) -> dict[str, float | None]:
        """``value``, ``low`` and ``high``; what is no finite number as None, which JSON has and NaN it has not."""
        return {name: finite(getattr(self, name)) for name in ("value", "low", "high")}


def parts(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    """``value``, ``low`` and ``high`` of a figure that a row holds as ``Interval.columns`` made it."""
    return {"value": row[name], "low": row[f"{name}_low"], "high": row[f"{name}_high"]}


def finite(value: float) -> float | None:
    """``value``, or None where it is no finite number."""
    return value if math.isfinite(value) else None


def quartiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median, third quartile (linear interpolation)."""
    q1, median, q3 = np.quantile(np.asarray(samples, dtype=float), [0.25, 0.5, 0.75])
    return float(q1), float(median), float(q3)


def paired_ratio(above: Sequence[float], below: Sequence[float]) -> Interval:
    """Median of above_i / below_i over the rounds i, with its bootstrap interval (percentiles; Efron 1979).

    Both must come from the same rounds: what slows a round down slows both sides of its ratio.

    Raises:
        ValueError: the lengths differ or nothing was measured.
    """
    if len(above) != len(below) or not len(above):
        raise ValueError(f"paired rounds wanted, got {len(above)} and {len(below)} samples")
    ratios = np.asarray(above, dtype=float) / np.asarray(below, dtype=float)
    picks = np.random.default_rng(SEED).integers(0, len(ratios), size=(RESAMPLES, len(ratios)))
    medians = np.median(ratios[picks], axis=1)
    low, high = np.quantile(medians, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(float(np.median(ratios)), float(low), float(high))


def mean_interval(samples: Sequence[float]) -> Interval:
    """Mean of a few samples (seeds) with its 95 % Student t interval; one sample has no bounds (NaN)."""
    mean = statistics.fmean(samples)
    if len(samples) < 2:
        return Interval(mean, math.nan, math.nan)
    half = t_quantile(len(samples) - 1) * spread(samples) / math.sqrt(len(samples))
    return Interval(mean, mean - half, mean + half)


def spread(samples: Sequence[float]) -> float:
    """Standard deviation over the samples (n − 1 in the denominator); NaN for a single one."""
    return statistics.stdev(samples) if len(samples) > 1 else math.nan


def t_quantile(freedom: int) -> float:
    """97.5 % quantile of Student's t."""
    return T_QUANTILE[freedom - 1] if freedom <= len(T_QUANTILE) else 1.960


def wilson(hits: int, trials: int) -> Interval:
    """A share with its 95 % interval (Wilson 1927): honest for few trials, and at none or all of them.

    Raises:
        ValueError: no trials, or hits outside 0 … trials.
    """
    if not 0 <= hits <= trials or trials < 1:
        raise ValueError(f"hits from 0 to trials ≥ 1 wanted, got {hits} of {trials}")
    z, share = 1.959964, hits / trials
    middle = share + z * z / (2 * trials)
    half = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    return Interval(share, max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale))


def sign_flip(differences: Sequence[float], resamples: int = 20000) -> float:
    """p value, two-sided, of paired differences whose mean would be zero: signs flipped at random (Fisher 1935).

    Raises:
        ValueError: no differences.
    """
    values = np.asarray(differences, dtype=float)
    if not len(values):
        raise ValueError("differences wanted, got none")
    signs = np.random.default_rng(SEED).choice((-1.0, 1.0), size=(resamples, len(values)))
    hits = np.count_nonzero(np.abs(signs @ values) >= abs(values.sum()) * (1 - 1e-12))
    return (hits + 1) / (resamples + 1)


def holm(p_values: Sequence[float], level: float) -> list[bool]:
    """Which hypotheses are rejected while the chance of any false rejection stays under ``level`` (Holm 1979)."""
    rejected = [False] * len(p_values)
    for left, index in zip(range(len(p_values), 0, -1), np.argsort(p_values, kind="stable").tolist(), strict=True):
        if p_values[index] > level / left:
            break
        rejected[index] = True
    return rejected
