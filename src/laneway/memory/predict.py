"""Memory demand of the next steps: from the shapes of the coming batches where they are known, else from the past. No torch here.

The loop tells what each step took (``observe``) and asks before the next what is coming (``forecast``):

    batches = LookAhead(loader, 8)
    forecaster = Forecaster(horizon=8)
    for batch in batches:
        signature = Signature.of(batch)
        forecast = forecaster.forecast([signature, *batches.upcoming()])    # of this step and those after it
        ...                                                                 # keep forecast.highest.high bytes free, and step
        forecaster.observe(signature, peak_bytes)

What this can't do. **The past cannot see a spike**: without the coming batches, a shape that never occurred is in no forecast,
a rare one only now and then, and where shapes are drawn at random the 95 % quantile of past maxima keeps far more free than most
steps need. Jumps of a curriculum are followed, not foreseen. Hand over the coming batches, and keep something that survives an
allocation that fails in any case.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from laneway.core import InputError, choice, positive_int
from laneway.memory.demand import DemandModel, Prediction
from laneway.memory.history import History
from laneway.memory.lookahead import LookAhead
from laneway.memory.signature import Signature

__all__ = ["Calibration", "DemandModel", "Forecast", "Forecaster", "LookAhead", "Prediction", "Signature"]

STEP_SOURCES = ("seen", "fitted", "history")
SOURCES = (*STEP_SOURCES, "highest")


@dataclass(frozen=True)
class Forecast:
    """The next steps, the first first, and the largest of them."""

    peaks: tuple[Prediction, ...]
    highest: Prediction


@dataclass(frozen=True)
class Calibration:
    """How forecasts compared with what came."""

    coverage: float
    """Part of the steps whose peak lay within its band; of ``highest``: not above it. NaN before the first."""
    mean_error: float
    """Mean of \\|predicted − peak\\| / peak. NaN before the first."""
    steps: int
    """Steps that were compared."""


class _Score:
    """Sums behind a Calibration."""

    def __init__(self, steps: int = 0, covered: int = 0, error: float = 0.0) -> None:
        self.steps, self.covered, self.error = steps, covered, error

    def add(self, predicted: Prediction, peak: int, from_below: bool) -> None:
        self.steps += 1
        self.covered += peak <= predicted.high and (not from_below or peak >= predicted.low)
        self.error += abs(predicted.bytes - peak) / peak


class Forecaster:
    """Peaks of the next steps, and a record of how well they were told.

    Args:
        horizon: steps to look ahead, 8 by default; 5 to 10 are usual.
        bucket: lengths are rounded up to a multiple of it; 1: exact shapes. See ``DemandModel``.
    """

    def __init__(self, horizon: int = 8, bucket: int = 1) -> None:
        self.horizon = positive_int("horizon", horizon)
        self.model = DemandModel(bucket)
        self.history = History(horizon)
        self._coming: deque[Prediction] = deque()
        self._watched: list[tuple[Prediction, int, int]] = []
        self._scores = {source: _Score() for source in SOURCES}

    def observe(self, signature: Signature, peak: int) -> None:
        """Learn what a step took, and compare it with what was forecast for it, if anything was.

        Args:
            signature: of the step's batch.
            peak: most bytes in use during the step. Peaks above what lives between steps learn faster than whole ones: the first
                step of a run has no optimizer state yet.

        Raises:
            InputError: ``peak`` is no integer ≥ 1.
        """
        positive_int("peak", peak)
        if self._coming:
            predicted = self._coming.popleft()
            self._scores[predicted.source].add(predicted, peak, from_below=True)
        self._watch(peak)
        self.model.observe(signature, peak)
        self.history.peaks.append(peak)

    def forecast(self, upcoming: Sequence[Signature] = ()) -> Forecast | None:
        """The next ``horizon`` steps; None where nothing was observed yet.

        Args:
            upcoming: signatures of the next batches, as many as are known; further ones than ``horizon`` are left out. Steps
                beyond them come from the history.
        """
        if not self.history.peaks:
            return None
        known = [prediction for signature in upcoming[: self.horizon] if (prediction := self.model.predict(signature))]
        rest = self.history.next_steps(len(known) + 1, self.horizon)
        peaks = (*known, *rest)
        highest = max(known, key=lambda prediction: prediction.high, default=None)
        if rest:
            past = self.history.highest()
            highest = past if highest is None or past.high > highest.high else highest
        assert highest is not None
        self._coming = deque(peaks)
        if self._watched and self._watched[-1][1] == self.horizon:  # asked again before the step
            self._watched.pop()
        self._watched.append((highest, self.horizon, 0))
        return Forecast(peaks, highest)

    def calibration(self, source: str | None = None) -> Calibration:
        """How the forecasts made so far compared with what came; each step counts with the last forecast before it.

        Args:
            source: only predictions that came from seen | fitted | history; or highest: the largest of each horizon; None: all
                steps.

        Raises:
            InputError: another source.
        """
        chosen = STEP_SOURCES if source is None else (choice("source", source, SOURCES),)
        scores = [self._scores[name] for name in chosen]
        steps = sum(score.steps for score in scores)
        if not steps:
            return Calibration(float("nan"), float("nan"), 0)
        return Calibration(sum(score.covered for score in scores) / steps, sum(score.error for score in scores) / steps, steps)

    def _watch(self, peak: int) -> None:
        """Count a step for every horizon that is still open, and score those that it ends."""
        open_: list[tuple[Prediction, int, int]] = []
        for predicted, left, most in self._watched:
            if left == 1:
                self._scores["highest"].add(predicted, max(most, peak), from_below=False)
            else:
                open_.append((predicted, left - 1, max(most, peak)))
        self._watched = open_

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on exactly, in plain JSON types."""
        return {
            "horizon": self.horizon,
            "model": self.model.state_dict(),
            "peaks": list(self.history.peaks),
            "coming": [prediction.as_json() for prediction in self._coming],
            "watched": [[prediction.as_json(), left, most] for prediction, left, most in self._watched],
            "scores": {name: [score.steps, score.covered, score.error] for name, score in self._scores.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Undo of ``state_dict``; raises InputError where the state is of another horizon or bucket."""
        if state["horizon"] != self.horizon:
            raise InputError("forecaster: horizon", state["horizon"], f"{self.horizon}, as this forecaster has")
        self.model.load_state_dict(state["model"])
        self.history.peaks.clear()
        self.history.peaks.extend(state["peaks"])
        self._coming = deque(Prediction(*told) for told in state["coming"])
        self._watched = [(Prediction(*told), left, most) for told, left, most in state["watched"]]
        self._scores = {name: _Score(*state["scores"][name]) for name in SOURCES}
