"""What is large, parameter by parameter: thresholds from a sample of each step and from how sizes were spread in earlier ones.

Gradients of different parameters differ by orders of magnitude, and so do their patterns: an embedding's are mostly zero, a
norm's nearly alike. So each parameter has a scale s = (mean of √|g|)² over a sample, smoothed over the steps; one value 1000
times the others hardly moves it, and zeros pull it down, so that what is rare in a parameter is large in it. Sizes |g| / s of all
parameters together then give, at the quantile of the share to drop, this step's τ: parameter p keeps |g| ≥ τ · s_p. Where all
gradients of a step are ten times as large, so is τ: as many are kept.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass

import torch
from torch import Tensor

from laneway.cluster.drop.bits import nonzero
from laneway.cluster.drop.pieces import Pieces
from laneway.cluster.drop.sizes import BLOCK, Format
from laneway.cluster.drop.units import norms, take_rows

__all__ = ["Pattern"]

LEAST = torch.finfo(torch.float32).tiny
SMALLEST = 2.0**-149  # above zero
SAMPLES = 32
"""At least so many entries of each parameter are looked at."""


class Pattern:
    """The scales of a vector's parameters.

    Args:
        pieces: what lies in the vector.
        sample: entries to look at in a step, about.
        smoothing: weight of the past in a scale, 0 to below 1.
        device: of the vector.

    Attributes:
        root: the smoothed mean of √|g| of each piece, fp32 [pieces].
        steps: observations so far.
    """

    def __init__(self, pieces: Pieces, sample: int, smoothing: float, device: torch.device) -> None:
        self.pieces, self.smoothing, self.steps = pieces, smoothing, 0
        lengths = [len(piece) for piece in pieces.pieces]
        self.root = torch.zeros(len(lengths), device=device)
        counts = [min(length, max(SAMPLES, -(-sample * length // pieces.numel))) for length in lengths]
        draw = torch.Generator().manual_seed(pieces.numel)
        places = [start + _places(len(piece), count, draw) for (start, piece), count in zip(pieces, counts, strict=True)]
        self._places = torch.cat(places).to(device)
        self._counts = torch.tensor(counts, device=device)
        self._owner = torch.repeat_interleave(torch.arange(len(counts), device=device), self._counts)
        self._weight = (torch.tensor(lengths, device=device) / self._counts)[self._owner]
        self._runs: dict[tuple[int, int], _Run] = {}

    def observe(self, vector: Tensor) -> None:
        """Take a step's finite values, fp32 or fp64 [numel], into the scales."""
        seen = vector[self._places].abs_().sqrt_().float()
        now = torch.zeros_like(self.root).index_add_(0, self._owner, seen) / self._counts
        self.root = now if self.steps == 0 else torch.lerp(now, self.root, self.smoothing)
        self.steps += 1

    def scales(self) -> Tensor:
        """s of each piece, fp32 [pieces], > 0."""
        return self.root.square().clamp_min_(LEAST)

    def choose(self, vector: Tensor, low: int, high: int, form: Format, sizes: Tensor | None = None) -> Tensor | None:
        """The units to keep of the entries low to high.

        Args:
            vector: their finite values, [high − low]; fp32, or for blocks fp64 too.
            low, high: where they lie in the whole vector.
            form: how many units may be kept, and what a unit is.
            sizes: of the vector's blocks, as ``norms`` says, where the caller has them.

        Returns: int64, ascending, at most form.kept; None where all are sent.
        """
        if form.coding == "dense":
            return None
        run = self._runs.get((low, high)) or self._run(low, high)
        scales = self.scales()[run.first : run.first + len(run.bounds) - 1]
        if form.unit > 1:
            return _blocks(vector, norms(vector) if sizes is None else sizes, scales, run, form)
        relative = _relative(vector, scales, run).abs_()
        least, enough = self._thresholds(relative, run, form)
        return _entries(relative, least, enough, form)

    def _run(self, low: int, high: int) -> _Run:
        starts = self.pieces.starts
        first, last = bisect_right(starts, low) - 1, bisect_left(starts, high)
        bounds = [0, *(start - low for start in starts[first + 1 : last]), high - low]
        samples = torch.searchsorted(self._places, torch.tensor([low, high], device=self._places.device)).tolist()
        blocks = _blocks_of(bounds, self._places.device)
        run = _Run(first, bounds, self._places[slice(*samples)] - low, self._weight[slice(*samples)], *blocks)
        self._runs[low, high] = run
        return run

    def _thresholds(self, relative: Tensor, run: _Run, form: Format) -> Tensor:
        """[τ, a larger one]: at least form.kept entries reach the first and fewer the second, as far as a sample tells (2 σ)."""
        if not run.places.numel():
            return relative.new_zeros(2)
        sizes, order = relative[run.places].sort()
        below = run.weights[order].cumsum(0)
        share = (form.entries - form.kept) / form.entries
        spread = math.sqrt(share * (1 - share) / below.numel())
        wanted = torch.tensor([max(0.0, share - spread), min(1.0, share + 2 * spread)], device=below.device)
        return sizes[torch.searchsorted(below, below[-1] * wanted, right=True).clamp_(max=below.numel() - 1)]


@dataclass(frozen=True)
class _Run:
    """Entries low to high: the first of their pieces and where each begins, and where samples lie, counted from low; which piece
    each block begins with, the blocks in which a piece ends before the block does, and which piece each of their entries is of.
    """

    first: int
    bounds: list[int]
    places: Tensor
    weights: Tensor
    owner: Tensor
    mixed: Tensor
    owners: Tensor


def _entries(relative: Tensor, least: Tensor, enough: Tensor, form: Format) -> Tensor:
    """The entries above zero that reach the least threshold; where they are too many, the largest."""
    flags = relative >= least.clamp(min=SMALLEST)
    excess = int(flags.count_nonzero()) - form.kept
    if excess > 0:
        doubtful = nonzero(flags & (relative < enough))
        if doubtful.numel() < excess:
            doubtful = nonzero(flags)
        smallest = relative.index_select(0, doubtful).topk(excess, largest=False, sorted=False).indices
        flags[doubtful.index_select(0, smallest)] = False
    return nonzero(flags)


def _relative(vector: Tensor, scales: Tensor, run: _Run) -> Tensor:
    """Each entry over its piece's scale."""
    relative = torch.empty_like(vector)
    for start, stop, scale in zip(run.bounds, run.bounds[1:], scales, strict=False):
        torch.div(vector[start:stop], scale, out=relative[start:stop])
    return relative


def _blocks(vector: Tensor, sizes: Tensor, scales: Tensor, run: _Run, form: Format) -> Tensor:
    """The blocks with the largest Σ (g / s)²."""
    if vector.dtype == torch.float32 and not _squares_fit(sizes, scales):
        sizes = norms(_relative(vector, scales, run))
    elif scales.numel() > 1:
        sizes = sizes / scales[run.owner]
        if run.mixed.numel():
            sizes[run.mixed] = torch.linalg.vector_norm(take_rows(vector, run.mixed, BLOCK) / scales[run.owners], dim=1)
    return sizes.topk(form.kept, sorted=False).indices.sort().values


def _squares_fit(sizes: Tensor, scales: Tensor) -> bool:
    """Whether squares of values that matter neither exceed fp32 nor vanish in it."""
    return bool(sizes.sum().isfinite() & (scales > 1e-15).all())


def _blocks_of(bounds: list[int], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """What ``_Run`` says of blocks."""
    starts = torch.tensor(bounds[1:-1], dtype=torch.int64, device=device)
    owner = torch.searchsorted(starts, torch.arange(0, bounds[-1], BLOCK, device=device), right=True)
    mixed = torch.unique(starts[starts % BLOCK > 0] // BLOCK)
    entries = mixed[:, None] * BLOCK + torch.arange(BLOCK, device=device)
    return owner, mixed, torch.searchsorted(starts, entries, right=True)


def _places(length: int, count: int, draw: torch.Generator) -> Tensor:
    """``count`` of ``length`` places, ascending: one at random in each of as many equal runs."""
    bounds = torch.arange(count + 1) * length // count
    runs = bounds[1:] - bounds[:-1]
    return bounds[:-1] + (torch.rand(count, generator=draw, dtype=torch.float64) * runs).long().clamp_(max=runs - 1)
