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

import torch
from torch import Tensor

from laneway.connections.transport import LEVELS, barycentre, excess

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
    """What a check sees. Natural logarithms, float64 on the host; NaN where a path has no gradient or one that is not finite."""

    quantiles: Tensor
    """[paths, levels]"""
    norms: Tensor
    """Of the 2-norms [paths]."""
    peaks: Tensor
    """Of the largest magnitudes [paths]."""

    @property
    def usable(self) -> Tensor:
        """Paths that can be judged and may serve as peers."""
        return self.quantiles.isfinite().all(1) & self.norms.isfinite()


@dataclass(frozen=True)
class Verdict:
    """Of each path: score, distance from its past; where quantiles, norm and largest magnitude should lie, as logarithms."""

    score: Tensor
    distance: Tensor
    target: Tensor
    norm: Tensor
    peak: Tensor

    @property
    def flagged(self) -> list[int]:
        """Paths that are contaminated."""
        return (self.score >= 1).nonzero().flatten().tolist()


class History:
    """What paths were like: moving averages of their quantiles, and their last norms and peaks."""

    def __init__(self, paths: int) -> None:
        self.mean = torch.zeros(paths, len(LEVELS), dtype=torch.float64)
        self.checks = torch.zeros(paths, dtype=torch.int64)
        self.norms = torch.full((paths, WINDOW), math.nan, dtype=torch.float64)
        self.steps = torch.zeros(paths, dtype=torch.int64)
        self.peaks = torch.full((paths, WINDOW), math.nan, dtype=torch.float64)
        self.distances = torch.full((paths, WINDOW), math.nan, dtype=torch.float64)

    def habit(self, settings: Settings) -> Tensor:
        """How far a path has strayed from its usual norm or distribution lately, without being contaminated."""
        spread = self.norms.nan_to_num(-math.inf).amax(1) - self.norm
        habit = torch.maximum(spread, self.distances.nan_to_num(0.0).amax(1)).nan_to_num(0.0)
        return habit.clamp(0.0, 1.5 * settings.floor)

    @property
    def mature(self) -> Tensor:
        """Paths that have a past, [paths]."""
        return (self.checks >= YOUNG) & (self.steps >= YOUNG)

    @property
    def norm(self) -> Tensor:
        """The usual norm of each path: the median of its last ones."""
        return self.norms.nanmedian(1).values

    def add_norms(self, norms: Tensor, held: dict[int, float]) -> None:
        """A step's norms; of contaminated paths at most what ``held`` says. Without a past, what they had so far is forgotten."""
        norms = norms.clone()
        for path, most in held.items():
            norms[path] = norms[path].clamp_max(most)
            if not self.mature[path]:
                self.norms[path] = math.nan
        _push(self.norms, self.steps, norms)
        self.steps += norms.isfinite()

    def add_check(self, reading: Reading, verdict: Verdict, settings: Settings) -> None:
        """A check's quantiles and peaks; of flagged paths what was expected, and ``release``."""
        usable, flagged = reading.usable, verdict.score >= 1
        weight = (1 / (self.checks + 1).double()).clamp_min(1 - settings.memory)[:, None]
        held = verdict.target + settings.release / weight  # moves the average itself by ``release``
        seen = torch.where(flagged[:, None], torch.minimum(reading.quantiles, held), reading.quantiles)
        self.mean = torch.where(usable[:, None], self.mean + weight * (seen - self.mean), self.mean)
        peaks = torch.where(flagged, torch.minimum(reading.peaks, verdict.peak + settings.release), reading.peaks)
        _push(self.peaks, self.checks, torch.where(usable, peaks, math.nan))
        _push(self.distances, self.checks, torch.where(usable & ~flagged, verdict.distance, math.nan))
        self.checks += usable

    def state_dict(self) -> dict[str, Any]:
        """All of it."""
        return {name: value.clone() for name, value in vars(self).items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo of ``state_dict``."""
        for name, value in vars(self).items():
            value.copy_(state[name])


def _push(ring: Tensor, counts: Tensor, values: Tensor) -> None:
    fine = values.isfinite().nonzero().flatten()
    ring[fine, counts[fine] % ring.shape[1]] = values[fine]


def suspicious(norms: Tensor, history: History, episode: Tensor, settings: Settings) -> Tensor:
    """The screen: paths [paths] whose norm leaps over its own past further than the others' do now, or is not finite.

    ``norms`` are logarithms; −inf stands for no gradient. ``episode``: paths that were contaminated when they were last checked.
    """
    leap, odd = norms - history.norm, norms.isnan() | norms.isposinf()
    known = leap.isfinite() & (history.steps >= YOUNG)
    if not known.any():
        return odd
    over = leap - leap[known].median()
    threshold = robust_threshold(over, known, settings.floor, settings.zeta)
    limit = (threshold + history.habit(settings)) * torch.where(episode, STAY, 1.0)
    return (known & (over > limit)) | odd


def judge(reading: Reading, history: History, kinds: Sequence[Sequence[int]], episode: Tensor, settings: Settings) -> Verdict:
    """Score every path and say what would be usual for it.

    Args:
        reading: what they are now.
        history: what they were.
        kinds: the paths of each kind.
        episode: [paths], which were contaminated when they were last checked.
        settings: what counts.
    """
    paths = len(reading.norms)
    score, distance = torch.zeros(2, paths, dtype=torch.float64)
    target = reading.quantiles.clone()
    norm, peak = reading.norms.clone(), reading.peaks.clone()
    usable = reading.usable
    known = usable & history.mature
    fresh = episode | (history.checks == 0) | (history.steps < YOUNG)
    drift = _common_drift(reading, history, known)
    for kind in kinds:
        here = torch.tensor([path for path in kind if usable[path]], dtype=torch.int64)
        if len(here) == 0:
            continue
        found = _Kind(reading, history, here, known[here], fresh[here], drift, settings)
        score[here], distance[here] = found.score, found.distance
        target[here], norm[here], peak[here] = found.target, found.norm, found.peak
    return Verdict(torch.where(episode, score / STAY, score), distance, target, norm, peak)


def _common_drift(reading: Reading, history: History, known: Tensor) -> tuple[float, float]:
    """How far all paths have moved since their past: medians of the mean over levels, and of the norm."""
    if not known.any():
        return 0.0, 0.0
    moved = (reading.quantiles - history.mean)[known].mean(1).median().item()
    return moved, (reading.norms - history.norm)[known].median().item()


class _Kind:
    """The usable paths of one kind, judged together."""

    def __init__(
        self,
        reading: Reading,
        history: History,
        here: Tensor,
        known: Tensor,
        fresh: Tensor,
        drift: tuple[float, float],
        settings: Settings,
    ) -> None:
        self.settings, self.known = settings, known
        self.q, self.n = reading.quantiles[here], reading.norms[here]
        self.past, self.usual, self.habit = history.mean[here], history.norm[here], history.habit(settings)[here]
        across, strict, self.centre = self._cross()
        self.distance, self.expected = self._temporal(drift)
        after = self.distance / (self._threshold(self.distance, known, settings.floor) + self.habit)
        young = torch.minimum(strict, self._leap(~fresh) / (settings.floor + self.habit))
        self.score = torch.where(known, torch.minimum(after, across), young)
        self.target = torch.where(known[:, None], self.expected, self.centre)
        middle = self.n.quantile(0.5)
        self.norm = torch.where(known, history.norms[here].nanquantile(0.9, dim=1), middle)
        past_peak = history.peaks[here].nan_to_num(-math.inf).amax(1)
        self.peak = torch.where(known, past_peak, reading.peaks[here].quantile(0.5))

    def _cross(self) -> tuple[Tensor, Tensor, Tensor]:
        """Against the peers: distance over its threshold with and without a past, and the peers' barycentre."""
        if len(self.q) < FEWEST:
            return torch.full_like(self.n, math.inf), torch.zeros_like(self.n), self.q
        floor, everyone = self.settings.floor, torch.ones_like(self.known)
        rough = excess(self.q, self.q.quantile(0.5, dim=0))
        centre = barycentre(self.q, rough - rough.quantile(0.5) < self._threshold(rough, everyone, floor))
        raw = torch.maximum(excess(self.q, centre), self.n - self.n.quantile(0.5))
        raw = raw - raw.quantile(0.5)
        return raw / floor, raw / self._threshold(raw, everyone, self.settings.young_floor), centre

    def _leap(self, measured: Tensor) -> Tensor:
        """Of the norm over its usual one, further than the others' leap; infinite for those that were not ``measured`` before."""
        leap = self.n - self.usual
        common = leap[measured].quantile(0.5).clamp_min(0) if int(measured.sum()) >= FEWEST else 0.0
        return torch.where(measured, leap - common, math.inf)

    def _temporal(self, drift: tuple[float, float]) -> tuple[Tensor, Tensor]:
        """Against the own past, moved as the peers moved: distance, and that past."""
        moved, leap, floor = self.q - self.past, self.n - self.usual, self.settings.floor
        common = moved.new_full((len(moved), 1), drift[0])
        if int(self.known.sum()) >= FEWEST:
            rough = excess(moved, moved[self.known].quantile(0.5, dim=0))
            common = barycentre(
                moved, self.known & (rough - rough[self.known].quantile(0.5) < self._threshold(rough, self.known, floor))
            )
            leap = leap - leap[self.known].quantile(0.5)
        else:
            leap = leap - drift[1]
        distance = torch.maximum(excess(moved, common.expand_as(moved)), leap)
        return torch.where(self.known, distance, 0.0), self.past + common

    def _threshold(self, distances: Tensor, among: Tensor, floor: float) -> float:
        return robust_threshold(distances, among, floor, self.settings.zeta)


def robust_threshold(distances: Tensor, among: Tensor, floor: float, zeta: float) -> float:
    """``zeta`` deviations, by the median absolute deviation of the paths ``among``; at least ``floor``, all there is of few."""
    if int(among.sum()) < FEWEST:
        return floor
    deviation = MAD * (distances[among] - distances[among].quantile(0.5)).abs().quantile(0.5)
    return max(floor, zeta * deviation.item())
