"""What a check sees of the gradients of all paths: a distribution from a bounded sample, the norm and the largest magnitude."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from laneway.connections.contamination import Reading
from laneway.connections.path_gradients import PathGradients
from laneway.connections.transport import BINS, quantiles

FEWEST_VALUES = 16  # other than zero, for a distribution


def read(gradients: PathGradients, sample: int) -> tuple[Reading, Tensor]:
    """Read all paths → (reading, paths with a value that is not finite [paths]); the same on every rank.

    Two collectives where gradients are sharded (a third where the square of a norm overflows), one transfer to the host.
    """
    paths = len(gradients.paths)
    squares, peaks = gradients.squares(), gradients.peaks()
    bad = ~peaks.isfinite()
    summed = gradients.reduce(torch.cat([gradients.counts(sample).flatten(), squares, bad.to(squares)]))
    peaks = gradients.reduce(torch.where(bad, 0.0, peaks), dist.ReduceOp.MAX)
    counts, squares, bad, peaks = torch.cat([summed, peaks]).double().cpu().split([paths * BINS, paths, paths, paths])
    poisoned = bad > 0
    if odd := (~squares.isfinite() & ~poisoned).nonzero().flatten().tolist():  # squares of finite gradients that overflowed
        squares[odd] = gradients.exact(odd)
    norms = torch.where(poisoned | (peaks == 0), math.nan, squares.log() / 2)
    counts = counts.view(paths, BINS)
    enough = (counts.sum(1) >= FEWEST_VALUES) & ~poisoned
    return Reading(
        torch.where(enough[:, None], quantiles(counts), math.nan), norms, torch.where(poisoned, math.nan, peaks.log())
    ), poisoned
