"""What a check sees of the gradients of all paths: a distribution from a bounded sample, the norm and the largest magnitude."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.distributed as dist

from laneway.connections.contamination import Reading
from laneway.connections.path_gradients import PathGradients
from laneway.connections.transport import BINS, quantiles

FEWEST_VALUES = 16  # other than zero, for a distribution


def read(gradients: PathGradients, sample: int) -> tuple[Reading, list[int]]:
    """Read all paths → (reading, paths with a value that is not finite); the same on every rank.

    Two collectives where gradients are sharded (a third where the square of a norm overflows), one transfer to the host.
    """
    paths = len(gradients.paths)
    squares, peaks = gradients.squares(), gradients.peaks()
    bad = ~peaks.isfinite()
    summed = gradients.reduce(torch.cat([gradients.counts(sample).flatten(), squares, bad.to(squares)]))
    peaks = gradients.reduce(torch.where(bad, 0.0, peaks), dist.ReduceOp.MAX)
    host = torch.cat([summed, peaks]).double().cpu()
    counts, squares, bad, peaks = (part.numpy() for part in host.split([paths * BINS, paths, paths, paths]))
    poisoned = bad > 0
    if odd := (~np.isfinite(squares) & ~poisoned).nonzero()[0].tolist():  # squares of finite gradients that overflowed
        squares[odd] = gradients.exact(odd).numpy()
    counts = counts.reshape(paths, BINS)
    enough = (counts.sum(1) >= FEWEST_VALUES) & ~poisoned
    with np.errstate(divide="ignore"):
        norms = np.where(poisoned | (peaks == 0), math.nan, np.log(squares) / 2)
        peaks = np.where(poisoned, math.nan, np.log(peaks))
    return Reading(np.where(enough[:, None], quantiles(counts), math.nan), norms, peaks), poisoned.nonzero()[0].tolist()
