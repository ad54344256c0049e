"""The peaks of the last steps, and what they say about the next ones when no shape is known. No torch here."""

from __future__ import annotations

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

    def next_step(self, ahead: int) -> Prediction:
        """One step, ``ahead`` ≥ 1 steps from now: the median of the window and its 5 % and 95 % quantiles, moved by the trend."""
        return self._quantiles(np.array(self.peaks, dtype=float), 0.5, ahead)

    def highest(self) -> Prediction:
        """The largest of the next ``horizon`` steps.

        The 95 % quantile of the maxima that horizons had in the past, or, as far as these follow a line (a curriculum), that line
        and the 95 % quantile about it. ``bytes`` is the median, ``high`` the quantile to plan for.
        """
        peaks = np.array(self.peaks, dtype=float)
        if len(peaks) > self.horizon:
            maxima = np.lib.stride_tricks.sliding_window_view(peaks, self.horizon).max(axis=1)
        else:
            maxima = np.maximum.accumulate(peaks)[-1:]
        return self._quantiles(maxima, 0.5, self.horizon)

    def _quantiles(self, values: np.ndarray, middle: float, ahead: int) -> Prediction:
        """Quantiles of ``values``, in part about their line ``ahead`` steps on, as much as that line explains."""
        wanted = [0.05, middle, 0.95]
        plain = np.quantile(values, wanted)
        recent = values[-TREND_WINDOW:]
        if len(recent) >= LEAST_TREND:
            steps = np.arange(len(recent), dtype=float)
            slope, level = np.polyfit(steps, recent, 1)
            left = recent - (level + slope * steps)
            explained = 1 - left.var() / max(recent.var(), 1e-9)
            weight = float(np.clip((explained - FAINT) / (CLEAR - FAINT), 0.0, 1.0))
            line = level + slope * (len(recent) - 1 + ahead) + np.quantile(left, wanted)
            plain = (1 - weight) * plain + weight * np.maximum(line, 0.0)
        low, expected, high = (float(value) for value in plain)
        return Prediction(expected, min(low, expected * (1 - NARROWEST)), max(high, expected * (1 + NARROWEST)), "history")
