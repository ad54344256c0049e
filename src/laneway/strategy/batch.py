"""How many sequences a step usually has."""

from __future__ import annotations

import itertools
import math

from laneway.strategy.refuse import batch_units
from laneway.strategy.space import Job

# Tokens of a batch by parameters: Brown et al., arXiv 2005.14165, table 2.1.
TOKENS = ((1.25e8, 0.5e6), (7.6e8, 0.5e6), (1.3e9, 1e6), (2.7e9, 1e6), (6.7e9, 2e6), (1.3e10, 2e6), (1.75e11, 3.2e6))

NEAR = 0.15  # how far from the usual a batch may be


def usual_tokens(parameters: float) -> float:
    """Tokens of a step, interpolated in the logarithms of size and tokens; held at both ends."""
    if parameters <= TOKENS[0][0]:
        return TOKENS[0][1]
    for (small, few), (large, many) in itertools.pairwise(TOKENS):
        if parameters <= large:
            part = math.log(parameters / small) / math.log(large / small)
            return few * (many / few) ** part
    return TOKENS[-1][1]


def usual_batch(job: Job, parameters: float) -> int:
    """Sequences near the usual number of tokens that as many data-parallel sizes as possible divide.

    Of those near by, the one with the most factors of two, so that a plan can be scaled.
    """
    wanted = max(1, round(usual_tokens(parameters) / job.seq_len))
    sizes = batch_units(job) or [1]
    unit = sizes[0]
    if not _near(unit, wanted):
        return max(unit, unit * round(wanted / unit))
    for size in sizes:
        both = math.lcm(unit, size)
        unit = both if _near(both, wanted) else unit
    return max(_near(unit, wanted), key=lambda size: (size & -size, -abs(size - wanted)))


def _near(unit: int, wanted: int) -> range:
    """Multiples of a unit that are near enough to what is wanted."""
    first = max(1, math.ceil(wanted * (1 - NEAR) / unit))
    return range(first * unit, int(wanted * (1 + NEAR)) + 1, unit)
