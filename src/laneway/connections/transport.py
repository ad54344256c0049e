"""Distributions of magnitudes in one dimension: histograms in the log domain, quantiles, barycentres, distances, transport.

Everything is in nats, u = ln|g|. A distribution is counted in fixed bins of half an octave, so that shards of a tensor add up
to the whole, exactly; its quantile function is linear within a bin and is taken at ``LEVELS``. In one dimension the
Wasserstein-p distance is that of the quantile functions in L^p, and the Wasserstein-2 barycentre has their mean as its
quantile function (Agueh and Carlier, SIAM J. Math. Anal. 43(2), 2011).
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Numbers = NDArray[np.float64]
Flags = NDArray[np.bool_]

BINS = 256
LOWEST, OCTAVES = -96.0, 0.5  # lower edge of the first bin as a power of two; width of a bin
_LOWEST_EXPONENT, _ROOT, _INFINITE = 127 + int(LOWEST), 0x3504F3, 0x7F800000  # bits of 2^LOWEST, √2 and infinity
_NATS = OCTAVES * math.log(2)
_EDGES = np.array([i / 32 for i in range(32)] + [1 - 2.0**-k for k in (6, 7, 8)] + [1.0])
LEVELS = (_EDGES[1:] + _EDGES[:-1]) / 2
"""Where quantiles are taken, [35]: evenly, and more closely in the upper tail, where a few huge values lie."""
WEIGHTS = _EDGES[1:] - _EDGES[:-1]
"""What each level stands for; they add up to one."""


def histograms(values: Tensor, owners: Tensor, count: int) -> Tensor:
    """How many of ``values`` [N] fall into each bin, by owner: fp32 [count, BINS].

    Zeros and what is not finite are left out; magnitudes beyond the bins count in the first or last one.
    """
    # By the bits of a float: exact, and two whole bins an octave. √2 lies just above its mantissa.
    bits = values.detach().abs().float().view(torch.int32)
    bins = ((bits >> 23) - _LOWEST_EXPONENT) * 2 + ((bits & 0x7FFFFF) > _ROOT)
    fine = (bits > 0) & (bits < _INFINITE)
    bins = bins.clamp_(0, BINS - 1).long()
    found = torch.zeros(count * BINS, device=values.device)
    # Whole numbers: the sum is exact in any order.
    return found.index_add_(0, owners * BINS + bins, fine.float()).view(count, BINS)


def quantiles(counts: Numbers) -> Numbers:
    """Counts [N, BINS] → ln|g| at ``LEVELS`` [N, levels]; NaN where nothing was counted."""
    below = counts.cumsum(1)
    total = below[:, -1:]
    wanted, lines = total * LEVELS, np.arange(len(counts))[:, None]
    apart = lines * (total.max(initial=0) + 1)  # one search for all lines: each lies above the one before
    bins = (np.searchsorted((below + apart).ravel(), (wanted + apart).ravel()).reshape(wanted.shape) - lines * BINS).clip(
        0, BINS - 1
    )
    inside = counts[lines, bins]
    part = ((wanted - (below[lines, bins] - inside)) / np.maximum(inside, 1)).clip(0, 1)
    return np.where(total > 0, LOWEST * math.log(2) + (bins + part) * _NATS, math.nan)


def distance(a: Numbers, b: Numbers, order: int = 2) -> Numbers:
    """Wasserstein distance of two quantile functions […, levels], in nats."""
    return (np.abs(a - b) ** order @ WEIGHTS) ** (1 / order)


def excess(a: Numbers, b: Numbers) -> Numbers:
    """The part of the Wasserstein-2 distance by which ``a`` is larger than ``b``: equal to it where a ≥ b everywhere."""
    return np.sqrt(np.square(np.maximum(a - b, 0)) @ WEIGHTS)


def barycentre(quantiles_: Numbers, inside: Flags) -> Numbers:
    """Of each distribution […, P, levels], the Wasserstein-2 barycentre of the others ``inside`` […, P]; NaN if there is none."""
    chosen = np.where(inside[..., None], quantiles_, 0.0)
    others = (inside.sum(-1, keepdims=True) - inside)[..., None]
    return np.where(others > 0, (chosen.sum(-2, keepdims=True) - chosen) / np.maximum(others, 1), math.nan)


def move_down(gradient: Tensor, source: Numbers, target: Numbers, strength: float, chunk: int = 1 << 20) -> None:
    """Transport a gradient's magnitudes from one distribution towards another, in place: signs stay, nothing grows.

    ln|g| ← ln|g| − strength · max(0, source − target), both taken at the level at which |g| lies in ``source``.

    Args:
        gradient: finite.
        source, target: quantile functions [levels] of what it is now and what is expected.
        strength: 0 (nothing) to 1 (all of the way).
        chunk: numbers that are worked on at a time, which bounds the memory in use.
    """
    down = strength * np.maximum(source - target, 0)
    wide = torch.promote_types(gradient.dtype, torch.float32)
    knots, shifts = (torch.from_numpy(values).to(gradient.device, wide) for values in (source, down))
    for part in gradient.view(-1).split(chunk) if gradient.is_contiguous() else [gradient]:
        factor = interpolate(part.abs().to(wide).log(), knots, shifts).neg_().exp_()
        part.copy_(part.to(wide) * factor)


def interpolate(x: Tensor, knots: Tensor, values: Tensor) -> Tensor:
    """Linear between increasing ``knots`` [K], constant beyond them."""
    right = torch.searchsorted(knots, x.contiguous()).clamp(1, len(knots) - 1)
    low, high = knots[right - 1], knots[right]
    part = ((x - low) / (high - low).clamp_min(torch.finfo(knots.dtype).tiny)).clamp(0, 1)
    return torch.lerp(values[right - 1], values[right], part)
