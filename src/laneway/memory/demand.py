"""Bytes that a step will need, from the shapes of its batch: looked up where they were seen, fitted where not. No torch here.

For fixed code, shapes decide the peak: the same shape gives the same number again, and over unseen shapes it lies on a line in
the tokens, so a handful of shapes is enough. What this cannot know: a step whose peak depends on the *contents* of the batch
(routed experts), and code that changes its behaviour at some shape.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from laneway.core import InputError, positive_int
from laneway.memory.regression import Fit, best_fit
from laneway.memory.signature import Signature

# No band is narrower than this part of the prediction: allocators round, other threads allocate.
NARROWEST = 0.005
REPEATS, FITTED_SHAPES, KNOWN_SHAPES = 4, 96, 4096


@dataclass(frozen=True)
class Prediction:
    """Bytes of a step at its peak."""

    bytes: float
    low: float
    """5 % of the steps lie below."""
    high: float
    """5 % of the steps lie above."""
    source: str
    """seen (this very shape) | fitted (over other shapes) | history (the shape is not known)"""

    def as_json(self) -> list[Any]:
        """Plain JSON types."""
        return [self.bytes, self.low, self.high, self.source]


class DemandModel:
    """Peak of a step as a function of its signature, learnt while the run goes on.

    Args:
        bucket: lengths are rounded up to a multiple of it before anything else; 1: exact shapes.

    Memory and time stay bounded however many shapes there are: the 4096 that were used last are looked up, and a fit takes up to
    96 of those, evenly over their sizes. A fit is made when a prediction needs one and enough shapes have come since the last.
    """

    def __init__(self, bucket: int = 1) -> None:
        self.bucket = positive_int("bucket", bucket)
        self._seen: OrderedDict[Signature, deque[int]] = OrderedDict()
        self._fit: Fit | None = None
        self._news = 0

    def __len__(self) -> int:
        return len(self._seen)

    def observe(self, signature: Signature, peak: int) -> None:
        """Learn that a step with this signature took ``peak`` bytes; raises InputError where that is no integer ≥ 1."""
        positive_int("peak", peak)
        signature = signature.bucketed(self.bucket)
        peaks = self._seen.setdefault(signature, deque(maxlen=REPEATS))
        self._seen.move_to_end(signature)
        if not peaks or abs(peak - peaks[-1]) > NARROWEST * peak:
            self._news += 1
        peaks.append(peak)
        if len(self._seen) > KNOWN_SHAPES:
            self._seen.popitem(last=False)

    def predict(self, signature: Signature) -> Prediction | None:
        """What a step with this signature will take; None where nothing was observed yet.

        A shape that was seen takes what it took last time (a bucket: at most, of the last four); the band is what it took the
        last four times. Any other lies on the fit; the band is that of the leave-one-out errors, wider in proportion where the
        shape is larger than all that were seen. With a single shape seen, bytes are taken to grow in proportion to tokens, which
        is too much rather than too little.
        """
        signature = signature.bucketed(self.bucket)
        peaks = self._seen.get(signature)
        if peaks:
            expected = peaks[-1] if self.bucket == 1 else max(peaks)
            margin = NARROWEST * expected
            return Prediction(expected, min(*peaks, expected - margin), max(*peaks, expected + margin), "seen")
        if not self._seen:
            return None
        fit = self.fit()
        if fit.form == "constant":
            return self._proportional(signature, fit)
        level = fit(signature.tokens, signature.pairs)
        further = max(1.0, signature.tokens / fit.longest)
        low, high = np.quantile(fit.errors, [0.05, 0.95]) if len(fit.errors) >= 20 else (min(fit.errors), max(fit.errors))
        lower, higher = max(-low, NARROWEST) * further, max(high, NARROWEST) * further
        return Prediction(level, max(0.0, level * (1 - lower)), level * (1 + higher), "fitted")

    def fit(self) -> Fit:
        """The present fit, made anew where more than an eighth of the shapes came after it; needs one observation."""
        if not self._seen:
            raise InputError("demand model", "no observation", "at least one observed step")
        if self._fit is None or 8 * self._news > len(self._seen):
            chosen = sorted(self._seen, key=lambda signature: (signature.tokens, signature.pairs))
            if len(chosen) > FITTED_SHAPES:
                chosen = [chosen[index] for index in np.linspace(0, len(chosen) - 1, FITTED_SHAPES).round().astype(int)]
            tokens = np.array([signature.tokens for signature in chosen], dtype=float)
            pairs = np.array([signature.pairs for signature in chosen], dtype=float)
            peaks = np.array([self._seen[signature][-1] for signature in chosen], dtype=float)
            self._fit, self._news = best_fit(tokens, pairs, peaks), 0
        return self._fit

    def _proportional(self, signature: Signature, fit: Fit) -> Prediction:
        """Where sizes could not be told apart yet, or did not matter; the band allows for growth beyond the largest."""
        peaks, sizes = [peaks[-1] for peaks in self._seen.values()], [seen.tokens for seen in self._seen]
        growth = max(1.0, signature.tokens / max(1, *sizes))
        level = fit(signature.tokens, signature.pairs) * (growth if len(set(sizes)) == 1 else 1.0)
        low = 0.0 if signature.tokens < min(sizes) else min(peaks) * (1 - NARROWEST)
        return Prediction(level, low, max(peaks) * growth * (1 + NARROWEST), "fitted")

    def state_dict(self) -> dict[str, Any]:
        """Everything learnt, in plain JSON types."""
        shapes = [[signature.as_json(), list(peaks)] for signature, peaks in self._seen.items()]
        fit = None if self._fit is None else [getattr(self._fit, name) for name in Fit.__dataclass_fields__]
        return {"bucket": self.bucket, "shapes": shapes, "fit": fit, "news": self._news}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Undo of ``state_dict``; raises InputError where the state is of another bucket."""
        if state["bucket"] != self.bucket:
            raise InputError("demand model: bucket", state["bucket"], f"{self.bucket}, as this model has")
        self._seen = OrderedDict((Signature.from_json(told), deque(peaks, REPEATS)) for told, peaks in state["shapes"])
        self._news = state["news"]
        self._fit = None
        if state["fit"] is not None:
            form, floor, coefficients, errors, longest = state["fit"]
            self._fit = Fit(form, floor, tuple(coefficients), tuple(errors), longest)
