"""What a check sees of the gradients of all paths: a distribution from a bounded sample, the norm and the largest magnitude."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from laneway.connections.contamination import Reading
from laneway.connections.path_gradients import PathGradients, View
from laneway.connections.transport import BINS, histograms, quantiles

FEWEST_VALUES = 16  # other than zero, for a distribution


def read(gradients: PathGradients, sample: int) -> tuple[Reading, Tensor]:
    """Read all paths → (reading, paths with a value that is not finite [paths]); the same on every rank.

    Every shard takes those of its values that a sample of the whole tensor has, so the counts are those of the whole. Two
    collectives where gradients are sharded, one transfer to the host.
    """
    paths = len(gradients.paths)
    squares, peaks = gradients.squares(), gradients.peaks()
    bad = ~peaks.isfinite()
    summed = gradients.reduce(torch.cat([_counts(gradients, sample).flatten(), squares, bad.to(squares)]))
    peaks = gradients.reduce(torch.where(bad, 0.0, peaks), dist.ReduceOp.MAX)
    counts, squares, bad, peaks = torch.cat([summed, peaks]).double().cpu().split([paths * BINS, paths, paths, paths])
    poisoned = bad > 0
    bound = peaks.log() + torch.tensor([path.elements for path in gradients.paths], dtype=torch.float64).log() / 2
    norms = torch.where(squares.isfinite(), squares.log() / 2, bound)  # the square of a finite gradient may overflow
    norms = torch.where(poisoned | (peaks == 0), math.nan, norms)
    counts = counts.view(paths, BINS)
    enough = (counts.sum(1) >= FEWEST_VALUES) & ~poisoned
    return Reading(
        torch.where(enough[:, None], quantiles(counts), math.nan), norms, torch.where(poisoned, math.nan, peaks.log())
    ), poisoned


def _counts(gradients: PathGradients, sample: int) -> Tensor:
    parts, owners = [], []
    for view in gradients.views:
        if view.counts and (part := sampled(view, sample)).numel():
            parts.append(part)
            owners.append(view.path)
    if not parts:
        return torch.zeros(len(gradients.paths), BINS, device=gradients.device)
    values = torch.cat([part.float() for part in parts])
    return histograms(values, gradients.owners(tuple(owners), tuple(map(len, parts))), len(gradients.paths))


def sampled(view: View, sample: int) -> Tensor:
    """Of a shard, what belongs to every ``stride``-th value of the whole piece; about ``sample`` values over all shards."""
    step = stride(view.piece.elements, view.piece.width, sample)
    return view.data.reshape(-1)[-view.offset % step :: step]


@functools.lru_cache(1024)
def stride(elements: int, width: int, sample: int) -> int:
    """Distance of the sampled values; it shares no divisor with the width, so that they come from all columns."""
    step = max(-(-elements // sample), 1)
    while step > 1 and math.gcd(step, width) > 1:
        step += 1
    return step


def norms_of(gradients: PathGradients, paths: Sequence[int]) -> Tensor:
    """The norms of a few paths, float64 on the host; the same on every rank."""
    zero = torch.zeros((), device=gradients.device)
    sums = [sum((v.data.float().square().sum() for v in gradients.of(p) if v.counts), zero) for p in paths]
    return gradients.reduce(torch.stack(sums)).double().sqrt().cpu()
