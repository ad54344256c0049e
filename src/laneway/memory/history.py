"""The peaks of the last steps, and what they say about the next ones when no shape is known. No torch here."""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from laneway.memory.demand import NARROWEST, Prediction

WINDOW, TREND_WINDOW, LEAST_TREND = 256, 96, 24
# Share of the variance that a trend must explain to count at all, and from which it counts alone.
FAINT, CLEAR = 0.3, 0.8


class History:
    """Peaks of the last 256 steps.

    Args:
        horizon: steps that a forecast looks ahead.
    """

    def __init__(self, horizon: int) -> None:
        self.horizon = horizon
        self.peaks: deque[int] = deque(maxlen=WINDOW)

    def next_steps(self, first: int, last: int) -> list[Prediction]:
        """Each of the steps ``first`` … ``last`` from now (1: the very next): the window's median, 5 % and 95 % quantiles."""
        ahead = np.arange(first, last + 1)
        return self._quantiles(np.array(self.peaks, dtype=float), ahead, run=1) if len(ahead) else []

    def highest(self) -> Prediction:
        """The largest of the next ``horizon`` steps.

        The 95 % quantile of the maxima that horizons had in the past, or, as far as these follow a line (a curriculum), that line
        and the 95 % quantile about it. ``bytes`` is the median, ``high`` the quantile to plan for.
        """
        peaks = np.array(self.peaks, dtype=float)
        if len(peaks) > self.horizon:
            maxima = np.lib.stride_tricks.sliding_window_view(peaks, self.horizon).max(axis=1)
        else:
            maxima = peaks.max(keepdims=True)
        return self._quantiles(maxima, np.array([self.horizon]), run=self.horizon)[0]

    def _quantiles(self, values: np.ndarray, ahead: np.ndarray, run: int) -> list[Prediction]:
        """Quantiles of ``values``, in part about their line, as much as that line explains.

        Args:
            values: one a step, the last one now.
            ahead: steps from now.
            run: so many values in a row share most of what they come from: the line rests on that many times fewer.
        """
        wanted = [0.05, 0.5, 0.95]
        told = np.tile(np.quantile(values, wanted), (len(ahead), 1))
        recent = values[-TREND_WINDOW:]
        if len(recent) >= LEAST_TREND:
            steps = np.arange(len(recent)) - (len(recent) - 1) / 2
            slope, level = float(steps @ recent / (steps @ steps)), float(recent.mean())
            left = recent - (level + slope * steps)
            explained = 1 - left.var() / max(recent.var(), 1e-9)
            weight = float(np.clip((explained - FAINT) / (CLEAR - FAINT), 0.0, 1.0))
            # Variance of a new value about a fitted line, at the end of the line: σ²(1 + 1/n + 3/n).
            wider = math.sqrt(1 + 4 * run / len(recent))
            line = level + slope * (steps[-1] + ahead)[:, None] + wider * np.quantile(left, wanted)
            told = (1 - weight) * told + weight * np.maximum(line, 0.0)
        return [
            Prediction(middle, min(low, middle * (1 - NARROWEST)), max(high, middle * (1 + NARROWEST)), "history")
            for low, middle, high in told.tolist()
        ]
