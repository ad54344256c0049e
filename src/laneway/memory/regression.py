"""Robust regression of a step's peak on its shape. Arithmetic only, no torch.

Peaks are close to ``max(floor, a + b·tokens)``, with ``c·B·T²`` where attention keeps its scores; the floor is what another phase
of the step (the optimizer, as a rule) needs whatever the shape. Relative errors count, so that small shapes weigh as much as
large ones. Estimation: least absolute deviations by reweighting, then one least-squares fit without the outliers (Tukey's
bisquare: Beaton & Tukey, Technometrics 16, 1974). Forms are compared by leave-one-out errors (PRESS: Allen, Technometrics 16,
1974), which follow from the leverages of one fit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

FORMS = ("constant", "linear", "attention")
# A richer form must be this much better, left out, to be taken; and errors below this are the same to us.
BETTER, SAME = 0.8, 1e-4
SWEEPS, CUT, SPLITS = 12, 4.685, 8
# Error of a shape that no other shape vouches for: leaving it out would leave the form undetermined.
ALONE = 0.1


@dataclass(frozen=True)
class Fit:
    """One fitted form."""

    form: str
    floor: float
    coefficients: tuple[float, ...]
    """Of 1, tokens and B·T², as far as the form has them; bytes."""
    errors: tuple[float, ...]
    """Of the shapes it was fitted on, each left out once: (true − predicted) / true."""
    longest: float
    """Most tokens among those shapes."""

    def __call__(self, tokens: float, pairs: float) -> float:
        """Peak in bytes."""
        return max(self.floor, float(np.dot(_columns(self.form, np.array([tokens]), np.array([pairs]))[0], self.coefficients)))

    @property
    def error(self) -> float:
        """Mean absolute leave-one-out error, relative."""
        return float(np.mean(np.abs(self.errors))) if self.errors else 0.0


def best_fit(tokens: np.ndarray, pairs: np.ndarray, peaks: np.ndarray) -> Fit:
    """The form that predicts shapes best that it has not seen; with few shapes the simplest that they can tell apart.

    Args:
        tokens: tokens of each shape [n], n ≥ 1.
        pairs: B·T² of each shape [n].
        peaks: bytes of each shape [n], > 0.
    """
    chosen = _fit("constant", tokens, pairs, peaks, -1.0)
    assert chosen is not None
    for form in FORMS[1:]:
        needed = len(_columns(form, tokens[:1], pairs[:1])[0])
        for split in _splits(tokens, needed):
            fitted = _fit(form, tokens, pairs, peaks, split)
            if fitted is None:
                continue
            plain = form == "linear" and chosen.form == "constant"
            if (plain and len(peaks) == 2) or fitted.error + SAME < BETTER * (chosen.error + SAME):
                chosen = fitted
    return chosen


def _columns(form: str, tokens: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    return np.stack([np.ones(len(tokens)), tokens, pairs][: 1 + FORMS.index(form)], axis=1)


def _splits(tokens: np.ndarray, needed: int) -> list[float]:
    """Where the floor may end: below every shape, or after some that leave enough above."""
    shapes = np.unique(tokens)
    last = len(shapes) - needed - 1
    inner = np.unique(np.linspace(1, last - 1, SPLITS).round().astype(int)) if last > 1 else []
    return [-1.0, *(float(shapes[index]) for index in inner)]


def _fit(form: str, tokens: np.ndarray, pairs: np.ndarray, peaks: np.ndarray, split: float) -> Fit | None:
    """One form with its floor over the shapes of up to ``split`` tokens; None where the shapes don't determine it."""
    above = tokens > split
    floor = float(np.median(peaks[~above])) if not above.all() else 0.0
    design = _columns(form, tokens, pairs) / peaks[:, None]
    scale = np.abs(design[above]).max(axis=0)
    rows = design[above] / scale
    if np.linalg.matrix_rank(rows, tol=1e-6) < rows.shape[1]:
        return None
    solution, leverage = _robust(rows)
    coefficients = solution / scale
    if (coefficients[1:] < 0).any():
        return None  # more tokens never need less
    fitted = np.maximum(floor / peaks, design @ coefficients)
    left_out = np.zeros(len(peaks))
    left_out[above] = leverage
    error = np.where(left_out > 1 - 1e-9, ALONE, (1 - fitted) / np.maximum(1 - left_out, 1e-9))
    return Fit(form, floor, tuple(coefficients.tolist()), tuple(error.tolist()), float(tokens.max()))


def _robust(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Solution of ``rows · x = 1`` in least absolute deviations, refined without outliers; and the leverages [n]."""
    weights = np.ones(len(rows))
    solution = np.zeros(rows.shape[1])
    for _ in range(SWEEPS):
        solution = _weighted(rows, weights)
        weights = 1 / np.maximum(np.abs(1 - rows @ solution), 1e-5)
    residual = np.abs(1 - rows @ solution)
    spread = max(1.4826 * float(np.median(residual)), 2e-3)
    weights = np.maximum(1 - (residual / (CUT * spread)) ** 2, 0.0) ** 2
    if np.linalg.matrix_rank(rows[weights > 0], tol=1e-6) < rows.shape[1]:
        weights = np.ones(len(rows))
    root = np.sqrt(weights)[:, None]
    q, _ = np.linalg.qr(rows * root)
    return _weighted(rows, weights), (q**2).sum(axis=1)


def _weighted(rows: np.ndarray, weights: np.ndarray) -> np.ndarray:
    root = np.sqrt(weights)
    return np.linalg.lstsq(rows * root[:, None], root, rcond=None)[0]
