"""The part of `laneway bench collectives` that times whole steps: how much of the communication a backward pass doesn't hide.

exposed: seconds of a step − seconds of the same step without communication, within a round.
exposed_left: exposed of a variant over exposed of plain DDP, within a round.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from laneway.bench.collectives_step import ALONE, PLAIN, MeasuredSteps
from laneway.bench.collectives_variants import PIECE_BYTES, VARIANTS, scheme_of
from laneway.bench.netlab import Network
from laneway.bench.netlab import run as run_lab
from laneway.bench.rows import Row
from laneway.bench.stats import Interval, paired_ratio, quartiles

__all__ = ["EXPOSED_LEFT", "STEP_VARIANTS", "judge_steps", "steps"]

SHAPE = {"layers": 4, "dim": 320, "heads": 4, "context": 64}
QUICK_SHAPE = {"layers": 2, "dim": 128, "heads": 4, "context": 32}
STEP_VARIANTS = ("levels_pipelined", "levels_bf16_hosts", "levels_drop")
EXPOSED_LEFT = 0.43
"""At most this share of plain DDP's exposed communication is to be left by the best variant."""
LIMIT_S = 400.0


def steps(
    network: Network, seconds: float, rounds: tuple[int, int], piece_bytes: int = PIECE_BYTES, quick: bool = False
) -> list[Row]:
    """A row for each way to average the gradients of one model, all from one run."""
    schemes = {name: scheme_of(VARIANTS[name], piece_bytes).to_dict() for name in STEP_VARIANTS}
    shape = QUICK_SHAPE if quick else SHAPE
    arguments: dict[str, Any] = {"shape": shape, "schemes": schemes, "seconds": seconds, "rounds": rounds}
    body = "laneway.bench.collectives_step:measure_steps"
    found: MeasuredSteps = run_lab(body, network, arguments, timeout=LIMIT_S + 3 * seconds, preload=("torch._dynamo",))[0]
    exposed = {name: np.subtract(found.seconds[name], found.seconds[ALONE]).tolist() for name in found.seconds}
    return [_row(network, shape, name, found, exposed) | {"quick": int(quick)} for name in found.seconds]


def _row(network: Network, shape: Mapping[str, int], name: str, found: MeasuredSteps, exposed: Mapping[str, list[float]]) -> Row:
    q1, median, q3 = (1000 * value for value in quartiles(found.seconds[name]))
    left = Interval.exact(1.0) if name == PLAIN else None if name == ALONE else paired_ratio(exposed[name], exposed[PLAIN])
    counts, size = found.nbytes[name], 4 * found.parameters
    return {
        "variant": name,
        "racks": len(network.shape),
        "hosts": len(network.hosts) // len(network.shape),
        "ranks": network.shape[0][0],
        "host_mbit": network.host_mbit,
        "rack_mbit": network.rack_mbit,
        **shape,
        "parameters": found.parameters,
        "rounds": len(found.seconds[name]),
        "wall_ms": median,
        "wall_ms_q1": q1,
        "wall_ms_q3": q3,
        "exposed_ms": 1000 * float(np.median(exposed[name])),
        **(left.columns("exposed_left") if left else dict.fromkeys(("exposed_left", "exposed_left_low", "exposed_left_high"))),
        "rack_over_gradient": max(count for link, count in counts.items() if link.startswith("rack")) / size,
        "host_over_gradient": max(count for link, count in counts.items() if not link.startswith("rack")) / size,
        "gradient_error": found.error.get(name),
    }


def judge_steps(rows: list[Row]) -> list[str]:
    """A line for the target, where rows are there."""
    left = {row["variant"]: row for row in rows if row["variant"] in STEP_VARIANTS}
    if not left:
        return []
    name, row = min(left.items(), key=lambda item: item[1]["exposed_left"])
    mark = "pass" if row["exposed_left"] <= EXPOSED_LEFT else "miss"
    span = f"{row['exposed_left_low']:.2f} … {row['exposed_left_high']:.2f}"
    return [
        f"{mark}: exposed communication over plain DDP's, best ({name}): {row['exposed_left']:.2f} ({span}; ≤ {EXPOSED_LEFT:g})"
    ]
