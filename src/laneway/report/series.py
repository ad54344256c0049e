"""Curves before they are drawn: smoothing without lag, and thinning that keeps every spike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

# Most points a drawn curve may have: beyond this a browser gets slow and the eye sees nothing more.
POINT_LIMIT = 1500
# Longer curves are averaged into this many stretches before they are smoothed.
SMOOTH_LIMIT = 6000


@dataclass(frozen=True)
class Curve:
    """Values over steps; NaN where a row has no finite value (drawn as a gap)."""

    x: np.ndarray
    y: np.ndarray

    @classmethod
    def of(cls, column: tuple[list[int], list[float]]) -> Curve:
        """From ``rundir.column``."""
        return cls(np.asarray(column[0], dtype=float), np.asarray(column[1], dtype=float))

    def __len__(self) -> int:
        return len(self.x)

    @property
    def drawable(self) -> bool:
        """Whether there is anything finite to draw."""
        return bool(np.isfinite(self.y).any())

    def last(self) -> float:
        """The last finite value, NaN where there is none."""
        finite = self.y[np.isfinite(self.y)]
        return float(finite[-1]) if len(finite) else float("nan")

    def smooth(self) -> Curve:
        """Two centred running means over 1/20 of the curve: no lag, and gaps stay gaps (in long curves: gaps of a block)."""
        curve = self if len(self) <= SMOOTH_LIMIT else self._blocks(SMOOTH_LIMIT)
        half = len(curve) // 40
        y = curve.y
        for _ in range(2 if half else 0):
            y = _running_mean(y, half)
        return Curve(curve.x, y)

    def _blocks(self, count: int) -> Curve:
        """Means over ``count`` equally long stretches."""
        starts = np.linspace(0, len(self), count, endpoint=False).astype(int)
        finite = np.isfinite(self.y)
        number = np.add.reduceat(finite.astype(int), starts)
        y = np.add.reduceat(np.where(finite, self.y, 0.0), starts) / np.maximum(number, 1)
        x = np.add.reduceat(self.x, starts) / np.diff([*starts, len(self)])
        return Curve(x, np.where(number > 0, y, np.nan))

    def thin(self, limit: int = POINT_LIMIT) -> Curve:
        """At most ``limit`` points: the lowest and the highest value of equally long stretches, in their order.

        A stretch with a gap keeps one NaN, which is no point, so that the curve still breaks there.
        """
        if len(self) <= limit:
            return self
        keep: list[int] = []
        for stretch in np.array_split(np.arange(len(self)), max(1, limit // 2)):
            y = self.y[stretch]
            finite = np.flatnonzero(np.isfinite(y))
            chosen = set()
            if len(finite):
                chosen = {finite[np.argmin(y[finite])], finite[np.argmax(y[finite])]}
            if len(finite) < len(stretch):
                chosen.add(np.flatnonzero(~np.isfinite(y))[0])
            keep += [int(stretch[i]) for i in sorted(chosen)]
        # The first and the last point carry the curve's ends.
        ends = [i for i in (0, len(self) - 1) if np.isfinite(self.y[i])]
        spare = [i for i in keep if i not in ends]
        room = limit - len(ends)
        points = [i for i in spare if np.isfinite(self.y[i])]
        drop = set(points[1 : 1 + max(0, len(points) - room)])
        index = np.array(sorted({*ends, *(i for i in spare if i not in drop)}), dtype=int)
        return Curve(self.x[index], self.y[index])

    def segments(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The stretches between gaps."""
        finite = np.isfinite(self.y)
        edges = np.flatnonzero(np.diff(np.concatenate([[False], finite, [False]]).astype(int)))
        for start, stop in zip(edges[::2], edges[1::2], strict=True):
            yield self.x[start:stop], self.y[start:stop]


def _running_mean(y: np.ndarray, half: int) -> np.ndarray:
    """Mean over [i − h, i + h] with h ≤ i / 4, since a power law is steep where it begins; the window is cut at the end.

    Window by window, not by a running total: one value of 1e20 would swallow the digits of all that follow.
    """
    finite = np.isfinite(y)
    padded = (np.pad(array, half) for array in (np.where(finite, y, 0.0), finite))
    windows = [np.lib.stride_tricks.sliding_window_view(array, 2 * half + 1) for array in padded]
    reach = np.minimum(half, np.arange(len(y)) // 4)
    inside = np.abs(np.arange(-half, half + 1))[None] <= reach[:, None]
    total, counted = (np.where(inside, window, 0).sum(1) for window in windows)
    return np.where(finite, total / np.maximum(counted, 1), np.nan)
