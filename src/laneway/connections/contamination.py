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
        self._norm: Tensor | None = None
        self._spread: Tensor | None = None

    def habit(self, settings: Settings) -> Tensor:
        """How far a path has strayed from its usual norm or distribution lately, without being contaminated."""
        if self._spread is None:
            spread = self.norms.nan_to_num(-math.inf).amax(1) - self.norm
            self._spread = torch.maximum(spread, self.distances.nan_to_num(0.0).amax(1)).nan_to_num(0.0)
        return self._spread.clamp(0.0, 1.5 * settings.floor)

    @property
    def mature(self) -> Tensor:
        """Paths that have a past, [paths]."""
        return (self.checks >= YOUNG) & (self.steps >= YOUNG)

    @property
    def norm(self) -> Tensor:
        """The usual norm of each path: the median of its last ones."""
        if self._norm is None:
            self._norm = self.norms.nanmedian(1).values
        return self._norm

    def add_norms(self, norms: Tensor, held: dict[int, float]) -> None:
        """A step's norms; of contaminated paths at most what ``held`` says. Without a past, what they had so far is forgotten."""
        norms = norms.clone()
        for path, most in held.items():
            norms[path] = norms[path].clamp_max(most)
            if not self.mature[path]:
                self.norms[path] = math.nan
        self.steps += _push(self.norms, self.steps, norms)
        self._norm = self._spread = None

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
        self._spread = None

    def state_dict(self) -> dict[str, Any]:
        """All of it."""
        return {name: value.clone() for name, value in self._kept().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo of ``state_dict``."""
        for name, value in self._kept().items():
            value.copy_(state[name])
        self._norm = self._spread = None

    def _kept(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}


def _push(ring: Tensor, counts: Tensor, values: Tensor) -> Tensor:
    """Put the finite ``values`` in their places; returns which are."""
    fine = np.isfinite(values.numpy())
    ring.numpy()[fine, counts.numpy()[fine] % ring.shape[1]] = values.numpy()[fine]
    return torch.from_numpy(fine)


def suspicious(norms: Tensor, history: History, episode: Tensor, settings: Settings) -> Tensor:
    """The screen: paths [paths] whose norm leaps over its own past further than the others' do now, or is not finite.

    ``norms`` are logarithms; −inf stands for no gradient. ``episode``: paths that were contaminated when they were last checked.
    """
    leap, odd = norms - history.norm, norms.isnan() | norms.isposinf()
    known = (leap.isfinite() & (history.steps >= YOUNG))[None]
    over = (leap - medians(leap[None], known, lower=True))[0]
    limit = (_thresholds(over[None], known, settings.floor, settings.zeta)[0] + history.habit(settings)) * _stay(episode)
    return (known[0] & (over > limit)) | odd


def judge(reading: Reading, history: History, kinds: Sequence[Sequence[int]], episode: Tensor, settings: Settings) -> Verdict:
    """Score every path and say what would be usual for it.

    Args:
        reading: what they are now.
        history: what they were.
        kinds: the paths of each kind.
        episode: [paths], which were contaminated when they were last checked.
        settings: what counts.
    """
    usable = reading.usable
    paths = torch.zeros(len(kinds), max(map(len, kinds)), dtype=torch.int64)  # one line a kind, filled up with path 0
    there = torch.zeros_like(paths, dtype=torch.bool)
    for line, kind in enumerate(kinds):
        paths[line, : len(kind)] = torch.tensor(kind)
        there[line, : len(kind)] = usable[paths[line, : len(kind)]]
    drift = _common_drift(reading, history, usable & history.mature)
    fresh = episode | (history.checks == 0) | (history.steps < YOUNG)
    found, at = _Kinds(reading, history, paths, there, fresh[paths], drift, settings), paths[there]

    def spread(values: Tensor, others: Tensor) -> Tensor:
        others = others.clone()
        others[at] = values[there]
        return others

    nothing = torch.zeros_like(reading.norms)
    return Verdict(
        spread(found.score, nothing) / _stay(episode),
        spread(found.distance, nothing),
        spread(found.target, reading.quantiles),
        spread(found.norm, reading.norms),
        spread(found.peak, reading.peaks),
    )


def _stay(episode: Tensor) -> Tensor:
    return torch.where(episode, STAY, 1.0).double()


def _common_drift(reading: Reading, history: History, known: Tensor) -> tuple[Tensor, Tensor]:
    """How far all paths have moved since their past: medians of the mean over levels, and of the norm; 0 without a past."""
    moved = torch.stack([(reading.quantiles - history.mean).mean(1), reading.norms - history.norm])
    levels, norm = medians(moved, known.expand_as(moved), lower=True).nan_to_num(0.0)[:, 0]
    return levels, norm


class _Kinds:
    """The usable paths of all kinds, one line a kind: all that is compared is compared within a line.

    ``paths`` [kinds, most paths of one]; ``there``: which of them count; ``fresh``: which were not found fine before.
    """

    def __init__(
        self,
        reading: Reading,
        history: History,
        paths: Tensor,
        there: Tensor,
        fresh: Tensor,
        drift: tuple[Tensor, Tensor],
        settings: Settings,
    ) -> None:
        self.settings, self.there, self.known = settings, there, there & history.mature[paths]
        self.q, self.n = reading.quantiles[paths], reading.norms[paths]
        self.past, self.usual, self.habit = history.mean[paths], history.norm[paths], history.habit(settings)[paths]
        across, strict, self.centre = self._cross()
        self.distance, self.expected = self._temporal(drift)
        after = self.distance / (self._threshold(self.distance, self.known, settings.floor) + self.habit)
        young = torch.minimum(strict, self._leap(there & ~fresh) / (settings.floor + self.habit))
        self.score = torch.where(self.known, torch.minimum(after, across), young)
        self.target = torch.where(self.known[..., None], self.expected, self.centre)
        self.norm = torch.where(self.known, _high(history.norms)[paths], medians(self.n, there))
        past_peak = history.peaks.nan_to_num(-math.inf).amax(1)[paths]
        self.peak = torch.where(self.known, past_peak, medians(reading.peaks[paths], there))

    def _cross(self) -> tuple[Tensor, Tensor, Tensor]:
        """Against the peers: distance over its threshold with and without a past, and the peers' barycentre."""
        floor, there = self.settings.floor, self.there
        centre = barycentre(self.q, self._usual(excess(self.q, medians(self.q, there)), there))
        raw = torch.maximum(excess(self.q, centre), self.n - medians(self.n, there))
        raw = raw - medians(raw, there)
        strict = raw / self._threshold(raw, there, self.settings.young_floor)
        peers = there.sum(1, keepdim=True) >= FEWEST
        centre = torch.where(peers[..., None], centre, self.q)
        return torch.where(peers, raw / floor, math.inf), torch.where(peers, strict, 0.0), centre

    def _leap(self, measured: Tensor) -> Tensor:
        """Of the norm over its usual one, further than the others' leap; infinite for those that were not ``measured`` before."""
        leap = self.n - self.usual
        common = torch.where(measured.sum(1, keepdim=True) >= FEWEST, medians(leap, measured).clamp_min(0), 0.0)
        return torch.where(measured, leap - common, math.inf)

    def _temporal(self, drift: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Against the own past, moved as the peers moved: distance, and that past."""
        moved, leap, known = self.q - self.past, self.n - self.usual, self.known
        peers = known.sum(1, keepdim=True) >= FEWEST
        rough = excess(moved, medians(moved, known))
        common = torch.where(peers[..., None], barycentre(moved, self._usual(rough, known)), drift[0])
        leap = leap - torch.where(peers, medians(leap, known), drift[1])
        distance = torch.maximum(excess(moved, common), leap)
        return torch.where(known, distance, 0.0), self.past + common

    def _usual(self, rough: Tensor, among: Tensor) -> Tensor:
        """Those ``among`` the paths that are no outliers by a rough distance."""
        return among & (rough - medians(rough, among) < self._threshold(rough, among, self.settings.floor))

    def _threshold(self, distances: Tensor, among: Tensor, floor: float) -> Tensor:
        return _thresholds(distances, among, floor, self.settings.zeta)


def _thresholds(distances: Tensor, among: Tensor, floor: float, zeta: float) -> Tensor:
    """``zeta`` deviations, by the median absolute deviation of the paths ``among``; at least ``floor``, all there is of few.

    [kinds, paths] → [kinds, 1].
    """
    deviation = zeta * MAD * medians((distances - medians(distances, among)).abs(), among)
    few = among.sum(1, keepdim=True) < FEWEST
    return torch.where(few, floor, deviation.clamp_min(floor))


def medians(values: Tensor, among: Tensor, lower: bool = False) -> Tensor:
    """The median over dim 1 of [kinds, paths, …] of those ``among`` [kinds, paths] → [kinds, 1, …]; NaN of none.

    Of an even number the ``lower`` of the two middle ones, or their mean.
    """
    found, counts = values.numpy(), among.numpy().sum(1)  # numpy: these are hundreds of small operations
    middle = np.full((len(found), 1, *found.shape[2:]), np.nan)
    ordered = np.sort(np.where(among.numpy().reshape(*among.shape, *[1] * (found.ndim - 2)), found, np.inf), 1)
    with np.errstate(invalid="ignore"):
        for line, count in enumerate(counts):
            if count:
                low, high = ordered[line, (count - 1) // 2], ordered[line, count // 2]
                middle[line, 0] = low if lower else (low + high) / 2
    return torch.from_numpy(middle)


def _high(norms: Tensor) -> Tensor:
    """The 0.9-quantile over each line of [paths, WINDOW], NaNs left out."""
    ordered = norms.sort(1).values  # NaN comes last
    place = 0.9 * (norms.isfinite().sum(1, keepdim=True) - 1).clamp_min(0).double()
    below = place.long()
    low, high = ordered.gather(1, below), ordered.gather(1, (below + 1).clamp_max(norms.shape[1] - 1))
    part = place - below
    return torch.where(part > 0, torch.lerp(low, high, part), low)[:, 0]
