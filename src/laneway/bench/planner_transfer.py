"""What generalises: constants fitted on one part of the published rows, tested on the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product

from laneway.bench.planner_machines import MEGATRON_ERA
from laneway.bench.planner_rows import Measured, mape, predict, recomputation, spearman
from laneway.bench.rows import Row
from laneway.cluster.costs import Calibration

GRID: dict[str, tuple[float, ...]] = {
    "matmul_fraction": (0.72, 0.76, 0.8, 0.84),
    "memory_fraction": (0.65, 0.73, 0.81, 0.89),
    "dispatch_s": (30e-6, 45e-6, 60e-6),
}
"""Constants that every part of the rows can tell something about."""
EMPIRICAL = ("crowding", "interference")
"""Terms that need several nodes or deep pipelines to show: tried on and off, together."""
EVERY = 12
"""Single-node rows looked at: one in so many."""


def transfer(multi: Sequence[Measured], single: Sequence[Measured], progress: Callable[[str], None]) -> list[Row]:
    """For each part: the best constants of the grid on it, and the error with them on every part."""
    parts = {size: [row for row in multi if row.size == size] for size in dict.fromkeys(row.size for row in multi)}
    parts["single node"] = list(single)[::EVERY]
    rows: list[Row] = []
    for name, fitted in parts.items():
        best = min(candidates(), key=lambda calibration: _error(fitted, calibration))
        progress(f"fitted on {name}: {', '.join(f'{key} {getattr(best, key):g}' for key in GRID)}")
        for tried in (best, replace(best, crowding=0.0, interference=0.0)):
            rows += _tests(name, parts, tried)
    return [*rows, *_tests("the defaults", parts, MEGATRON_ERA)]


def candidates() -> Iterator[Calibration]:
    """All points of the grid."""
    for values in product(*GRID.values()):
        yield Calibration.of({"flash_attention": MEGATRON_ERA.flash_attention, **dict(zip(GRID, values, strict=True))})


def _tests(name: str, parts: dict[str, list[Measured]], calibration: Calibration) -> Iterable[Row]:
    for part, rows in parts.items():
        measured, ours = [row.seconds for row in rows], _predicted(rows, calibration)
        yield {
            "fitted_on": name,
            "tested_on": part,
            "rows": len(rows),
            **{key: getattr(calibration, key) for key in (*GRID, *EMPIRICAL)},
            "mape": mape(measured, ours),
            "spearman": spearman(measured, ours),
            "assumption": "grid of three constants, mean error; the others as they are by default",
        }


def _predicted(rows: Sequence[Measured], calibration: Calibration) -> list[float]:
    settings = recomputation(rows)
    return [predict(row, settings[row.size], calibration).seconds.value for row in rows]


def _error(rows: Sequence[Measured], calibration: Calibration) -> float:
    return mape([row.seconds for row in rows], _predicted(rows, calibration))
