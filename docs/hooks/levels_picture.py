"""Draws docs/assets/levels-sweep.svg from benchmarks/results/planner_sweep.csv: python docs/hooks/levels_picture.py [--check]

Two charts over the size of a message, both axes in powers of ten: an all-reduce, and a reduce-scatter, over the slowest network
of the sweep. Each scheme is a curve; what the planner takes is dotted on top of the one that wins.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from laneway.report.chart import Chart, Line
from laneway.report.series import Curve

sys.path.insert(0, str(Path(__file__).parent))
import measured
import picture

NAME = "planner_sweep"
TARGET = measured.ROOT / "docs" / "assets" / "levels-sweep.svg"
SCHEMES = {
    "all_reduce": {"ring": "ring", "tree": "tree", "hierarchy": "3 levels", "two_level": "2 levels"},
    "reduce_scatter": {"ring": "ring", "hierarchy": "3 levels", "two_level": "2 levels", "torus": "torus"},
}
TITLES = {"all_reduce": "All-reduce, ms over bytes (powers of ten)", "reduce_scatter": "Reduce-scatter, ms over bytes"}


def charts(rows: list[measured.Row]) -> list[Chart]:
    """What is drawn."""
    newest = max(str(row["date"]) for row in rows)
    slowest = min(float(row["outer_gb_s"]) for row in rows if row["outer_gb_s"] is not None)
    mine = [row for row in rows if row["date"] == newest and row["outer_gb_s"] == slowest]
    return [_chart(op, [row for row in mine if row["op"] == op]) for op in SCHEMES]


def _chart(op: str, rows: list[measured.Row]) -> Chart:
    lines = [Line(_curve(rows, f"{scheme}_ms"), label, index) for index, (scheme, label) in enumerate(SCHEMES[op].items())]
    lines.append(Line(_curve(rows, "chosen_ms"), "chosen", len(lines), kind="points"))
    return Chart(TITLES[op], "", lines, x_title="bytes, as a power of ten", log=True, fine_x=True)


def _curve(rows: list[measured.Row], column: str) -> Curve:
    found = sorted((float(row["message_bytes"]), float(row[column])) for row in rows if row[column] is not None)
    if not found:
        raise measured.MeasuredError(f"column {column!r} is empty")
    x, y = np.array(found).T
    return Curve(np.log10(x), y)


def main(args: list[str]) -> int:
    """Write or check."""
    return picture.publish(NAME, TARGET, lambda rows: picture.compose(charts(rows)), "--check" in args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
