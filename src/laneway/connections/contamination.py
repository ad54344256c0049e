"""Which paths are contaminated: every path against its own past and against its peers. All on the host, in float64.

For a path p of kind K, with q its quantile function of ln|g| now, q̄ its own moving average, n the 2-norm of its gradient, m the
median of ln n over its last ``WINDOW`` steps, and leave-one-out barycentres over the peers that are no outliers themselves:

    expected      r = q̄ + barycentre of the peers now − barycentre of the peers' past       (the past moved as the peers moved)
    temporal      d = max( excess of q over r,   ln n − m − median over K of (ln n − m) )
    cross-path    x = max( excess of q over the peers' barycentre,   ln n − median over K of ln n ),   less its median over K
    habit         h = max( largest d of the last checks,  largest ln n of the last steps − m ),  at most 1.5 · floor
    threshold     t = max( floor, ζ · 1.4826 · median absolute deviation of d over K ) + h
    score         min( d / t,  x / floor ); contaminated from 1 on, and until it is below ½ again

The excess is the Wasserstein-2 distance as far as the path is the larger one; the norm sees a few huge values that a sample may
miss. Gradients of some paths (the first sites') vary by orders of magnitude in a healthy run: the habit is what each path does
without being contaminated. A path without a past is judged by its peers alone: contaminated where x is above a higher floor and
ζ · 1.4826 · median absolute deviation of x over K. Once a check has found it fine, its norm must have leapt too:

    leap          ln n − m − max(0, median over K of (ln n − m)),   over floor + h

since in the first steps of a run paths part from their peers by orders of magnitude without any leap. A path with fewer than two
peers is judged by its past alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from laneway.connections.transport import LEVELS, Flags, Numbers, barycentre, excess

Places = NDArray[np.int64]
MAD = 1.4826  # median absolute deviation → standard deviation of a normal distribution
WINDOW = 32  # norms and peaks that a path remembers
YOUNG = 3  # checks until a path has a past
FEWEST = 3  # paths of a kind that make peers
STAY = 0.5  # part of the threshold above which a contaminated path stays so


@dataclass(frozen=True)
class Settings:
    """What counts as contaminated. All in nats but for ``zeta``."""

    floor: float
    """Least distance that is ever an outlier's."""
    young_floor: float
    """The same for a path without a past."""
    zeta: float
    """Deviations of the peers that an outlier must exceed."""
    release: float
    """How far the past of a contaminated path follows it, at each check."""
    memory: float = 0.7
    """Decay of the moving average of quantiles, at each check."""


@dataclass(frozen=True)
class Reading:
    """What a check sees. Natural logarithms; NaN where a path has no gradient or one that is not finite."""

    quantiles: Numbers
    """[paths, levels]"""
    norms: Numbers
    """Of the 2-norms [paths]."""
    peaks: Numbers
    """Of the largest magnitudes [paths]."""

    @property
    def usable(self) -> Flags:
        """Paths that can be judged and may serve as peers."""
        return np.isfinite(self.quantiles).all(1) & np.isfinite(self.norms)


@dataclass(frozen=True)
class Verdict:
    """Of each path: score, distance from its past; where quantiles, norm and largest magnitude should lie, as logarithms."""

    score: Numbers
    distance: Numbers
    target: Numbers
    norm: Numbers
    peak: Numbers

    @property
    def flagged(self) -> list[int]:
        """Paths that are contaminated."""
        return (self.score >= 1).nonzero()[0].tolist()


class History:
    """What paths were like: moving averages of their quantiles, and their last norms and peaks."""

    def __init__(self, paths: int) -> None:
        self.mean = np.zeros((paths, len(LEVELS)))
        self.checks = np.zeros(paths, np.int64)
        self.norms = np.full((paths, WINDOW), math.nan)
        self.steps = np.zeros(paths, np.int64)
        self.peaks = np.full((paths, WINDOW), math.nan)
        self.distances = np.full((paths, WINDOW), math.nan)
        self._norm: Numbers | None = None
        self._spread: Numbers | None = None

    def habit(self, settings: Settings) -> Numbers:
        """How far a path has strayed from its usual norm or distribution lately, without being contaminated."""
        if self._spread is None:
            spread = _largest(self.norms, -math.inf) - self.norm
            self._spread = np.fmax(spread, _largest(self.distances, 0.0))
        return self._spread.clip(0.0, 1.5 * settings.floor)

    @property
    def mature(self) -> Flags:
        """Paths that have a past, [paths]."""
        return (self.checks >= YOUNG) & (self.steps >= YOUNG)

    @property
    def norm(self) -> Numbers:
        """The usual norm of each path: the (lower) median of its last ones."""
        if self._norm is None:
            middle = np.maximum((~np.isnan(self.norms)).sum(1) - 1, 0) // 2
            self._norm = np.sort(self.norms, 1)[np.arange(len(middle)), middle]  # NaN comes last
        return self._norm

    def add_norms(self, norms: Numbers, held: dict[int, float]) -> None:
        """A step's norms; of contaminated paths at most what ``held`` says. Without a past, what they had so far is forgotten."""
        norms = norms.copy()
        for path, most in held.items():
            norms[path] = min(norms[path], most)
            if not self.mature[path]:
                self.norms[path] = math.nan
        self.steps += _push(self.norms, self.steps, norms)
        self._norm = self._spread = None

    def add_check(self, reading: Reading, verdict: Verdict, settings: Settings) -> None:
        """A check's quantiles and peaks; of flagged paths what was expected, and ``release``."""
        usable, flagged = reading.usable, verdict.score >= 1
        weight = np.maximum(1 / (self.checks + 1), 1 - settings.memory)[:, None]
        held = verdict.target + settings.release / weight  # moves the average itself by ``release``
        seen = np.where(flagged[:, None], np.minimum(reading.quantiles, held), reading.quantiles)
        self.mean = np.where(usable[:, None], self.mean + weight * (seen - self.mean), self.mean)
        peaks = np.where(flagged, np.minimum(reading.peaks, verdict.peak + settings.release), reading.peaks)
        _push(self.peaks, self.checks, np.where(usable, peaks, math.nan))
        _push(self.distances, self.checks, np.where(usable & ~flagged, verdict.distance, math.nan))
        self.checks += usable
        self._spread = None

    def state_dict(self) -> dict[str, Any]:
        """All of it, as tensors."""
        return {name: torch.tensor(value) for name, value in self._kept().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo of ``state_dict``."""
        for name, value in self._kept().items():
            value[...] = state[name].numpy()
        self._norm = self._spread = None

    def _kept(self) -> dict[str, NDArray[Any]]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}


def _push(ring: Numbers, counts: Places, values: Numbers) -> Flags:
    """Put the finite ``values`` in their places; returns which are."""
    fine = np.isfinite(values)
    ring[fine, counts[fine] % ring.shape[1]] = values[fine]
    return fine


def _largest(rows: Numbers, of_none: float) -> Numbers:
    """Of each line, NaNs left out."""
    return np.where(np.isnan(rows), of_none, rows).max(1)


def suspicious(norms: Numbers, history: History, episode: Flags, settings: Settings) -> Flags:
    """The screen: paths [paths] whose norm leaps over its own past further than the others' do now, or is not finite.

    ``norms`` are logarithms; −inf stands for no gradient. ``episode``: paths that were contaminated when they were last checked.
    """
    leap = norms - history.norm
    known = np.isfinite(leap) & (history.steps >= YOUNG)
    odd = np.isnan(norms) | (norms == math.inf)
    if not known.any():
        return odd
    over = leap - _middle(leap[known], lower=True)
    common, limit = over[known], settings.floor
    if len(common) >= FEWEST:
        limit = max(limit, settings.zeta * MAD * _middle(np.abs(common - _middle(common))))
    return (known & (over > (limit + history.habit(settings)) * _stay(episode))) | odd


def _middle(values: Numbers, lower: bool = False) -> float:
    """The median; of an even number the ``lower`` of the two middle ones, or their mean."""
    ordered, last = np.sort(values), len(values) - 1
    low = ordered[last // 2]
    return low if lower else (low + ordered[(last + 1) // 2]) / 2


class Kinds:
    """The paths of each kind, one line a kind, filled up with path 0: all that is compared is compared within a line.

    Args:
        kinds: of each its paths.
    """

    def __init__(self, kinds: Sequence[Sequence[int]]) -> None:
        self.paths = np.zeros((len(kinds), max(map(len, kinds))), np.int64)
        self.real = np.zeros(self.paths.shape, np.bool_)
        for line, kind in enumerate(kinds):
            self.paths[line, : len(kind)] = kind
            self.real[line, : len(kind)] = True


def judge(reading: Reading, history: History, kinds: Kinds, episode: Flags, settings: Settings) -> Verdict:
    """Score every path and say what would be usual for it.

    Args:
        reading: what they are now.
        history: what they were.
        kinds: the paths of each kind.
        episode: [paths], which were contaminated when they were last checked.
        settings: what counts.
    """
    usable, paths = reading.usable, kinds.paths
    there = kinds.real & usable[paths]
    fresh = episode | (history.checks == 0) | (history.steps < YOUNG)
    with np.errstate(all="ignore"):  # NaN and infinity stand for what there is not
        drift = _common_drift(reading, history, usable & history.mature)
        found, at = _Compared(reading, history, paths, there, fresh[paths], drift, settings), paths[there]

        def spread(values: Numbers, others: Numbers) -> Numbers:
            others = others.copy()
            others[at] = values[there]
            return others

        nothing = np.zeros_like(reading.norms)
        return Verdict(
            spread(found.score, nothing) / _stay(episode),
            spread(found.distance, nothing),
            spread(found.target, reading.quantiles),
            spread(found.norm, reading.norms),
            spread(found.peak, reading.peaks),
        )


def _stay(episode: Flags) -> Numbers:
    return np.where(episode, STAY, 1.0)


def _common_drift(reading: Reading, history: History, known: Flags) -> tuple[float, float]:
    """How far all paths have moved since their past: medians of the mean over levels, and of the norm; 0 without a past."""
    moved = np.stack([(reading.quantiles - history.mean).mean(1), reading.norms - history.norm])
    levels, norm = np.nan_to_num(medians(moved, np.broadcast_to(known, moved.shape), lower=True), nan=0.0)[:, 0]
    return levels, norm


class _Compared:
    """The usable paths of all kinds.

    ``paths`` [kinds, most paths of one]; ``there``: which of them count; ``fresh``: which were not found fine before.
    """

    def __init__(
        self,
        reading: Reading,
        history: History,
        paths: Places,
        there: Flags,
        fresh: Flags,
        drift: tuple[float, float],
        settings: Settings,
    ) -> None:
        self.settings, self.there, self.known = settings, there, there & history.mature[paths]
        self.q, self.n = reading.quantiles[paths], reading.norms[paths]
        self.past, self.usual, self.habit = history.mean[paths], history.norm[paths], history.habit(settings)[paths]
        across, strict, self.centre = self._cross()
        self.distance, self.expected = self._temporal(drift)
        after = self.distance / (self._threshold(self.distance, self.known, settings.floor) + self.habit)
        young = np.minimum(strict, self._leap(there & ~fresh) / (settings.floor + self.habit))
        self.score = np.where(self.known, np.minimum(after, across), young)
        self.target = np.where(self.known[..., None], self.expected, self.centre)
        self.norm = np.where(self.known, _high(history.norms)[paths], medians(self.n, there))
        past_peak = _largest(history.peaks, -math.inf)[paths]
        self.peak = np.where(self.known, past_peak, medians(reading.peaks[paths], there))

    def _cross(self) -> tuple[Numbers, Numbers, Numbers]:
        """Against the peers: distance over its threshold with and without a past, and the peers' barycentre."""
        floor, there = self.settings.floor, self.there
        centre = barycentre(self.q, self._usual(excess(self.q, medians(self.q, there)), there))
        raw = np.maximum(excess(self.q, centre), self.n - medians(self.n, there))
        raw = raw - medians(raw, there)
        strict = raw / self._threshold(raw, there, self.settings.young_floor)
        peers = there.sum(1, keepdims=True) >= FEWEST
        centre = np.where(peers[..., None], centre, self.q)
        return np.where(peers, raw / floor, math.inf), np.where(peers, strict, 0.0), centre

    def _leap(self, measured: Flags) -> Numbers:
        """Of the norm over its usual one, further than the others' leap; infinite for those that were not ``measured`` before."""
        leap = self.n - self.usual
        common = np.where(measured.sum(1, keepdims=True) >= FEWEST, np.maximum(medians(leap, measured), 0), 0.0)
        return np.where(measured, leap - common, math.inf)

    def _temporal(self, drift: tuple[float, float]) -> tuple[Numbers, Numbers]:
        """Against the own past, moved as the peers moved: distance, and that past."""
        moved, leap, known = self.q - self.past, self.n - self.usual, self.known
        peers = known.sum(1, keepdims=True) >= FEWEST
        rough = excess(moved, medians(moved, known))
        common = np.where(peers[..., None], barycentre(moved, self._usual(rough, known)), drift[0])
        leap = leap - np.where(peers, medians(leap, known), drift[1])
        distance = np.maximum(excess(moved, common), leap)
        return np.where(known, distance, 0.0), self.past + common

    def _usual(self, rough: Numbers, among: Flags) -> Flags:
        """Those ``among`` the paths that are no outliers by a rough distance."""
        return among & (rough - medians(rough, among) < self._threshold(rough, among, self.settings.floor))

    def _threshold(self, distances: Numbers, among: Flags, floor: float) -> Numbers:
        return _thresholds(distances, among, floor, self.settings.zeta)


def _thresholds(distances: Numbers, among: Flags, floor: float, zeta: float) -> Numbers:
    """``zeta`` deviations, by the median absolute deviation of the paths ``among``; at least ``floor``, all there is of few.

    [kinds, paths] → [kinds, 1].
    """
    deviation = zeta * MAD * medians(np.abs(distances - medians(distances, among)), among)
    few = among.sum(1, keepdims=True) < FEWEST
    return np.where(few, floor, np.maximum(deviation, floor))


def medians(values: Numbers, among: Flags, lower: bool = False) -> Numbers:
    """The median over dim 1 of [kinds, paths, …] of those ``among`` [kinds, paths] → [kinds, 1, …]; NaN of none.

    Of an even number the ``lower`` of the two middle ones, or their mean.
    """
    counts, more = among.sum(1), (1,) * (values.ndim - 2)
    ordered = np.sort(np.where(among.reshape(*among.shape, *more), values, math.inf), 1)
    lines = np.arange(len(counts))
    middle = ordered[lines, np.maximum(counts - 1, 0) // 2]
    if not lower:
        middle = (middle + ordered[lines, np.minimum(counts // 2, ordered.shape[1] - 1)]) / 2
    return np.where((counts > 0).reshape(-1, *more), middle, math.nan)[:, None]


def _high(norms: Numbers) -> Numbers:
    """The 0.9-quantile over each line of [paths, WINDOW], NaNs left out."""
    ordered, lines = np.sort(norms, 1), np.arange(len(norms))  # NaN comes last
    place = 0.9 * np.maximum(np.isfinite(norms).sum(1) - 1, 0)
    below = place.astype(np.int64)
    low, high = ordered[lines, below], ordered[lines, np.minimum(below + 1, norms.shape[1] - 1)]
    part = place - below
    return np.where(part > 0, low + part * (high - low), low)
