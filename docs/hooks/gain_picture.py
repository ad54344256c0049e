"""Draws docs/assets/gain-over-training.svg from the rows of stability_curves: python docs/hooks/gain_picture.py [--check]

Two charts over the steps of training, medians over the runs of a cell that are still finite: with fp32 streams the composite gain
of gradients (mHC's forward gain is one) on an axis in powers of ten, and with fp16 streams the loss, where a curve ends when its
last run is no longer finite.
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

NAME = "stability_curves"
TARGET = measured.ROOT / "docs" / "assets" / "gain-over-training.svg"
VARIANTS = {"hc": "HC", "mhc": "mHC", "mhc-lite": "mHC-lite", "residual": "residual"}
GAIN, LOSS = "lr-0.03", "fp16"  # conditions


def charts(rows: list[measured.Row]) -> list[Chart]:
    """What is drawn."""
    wide = [variant for variant in VARIANTS if variant != "residual"]
    gains = [_line(rows, variant, index, GAIN, "gain_backward_median") for index, variant in enumerate(wide)]
    losses = [_line(rows, variant, index, LOSS, "loss_median") for index, variant in enumerate(VARIANTS)]
    return [
        Chart("Composite gain of gradients, fp32 streams", "", gains, log=True),
        Chart("Training loss, fp16 streams", "", losses),
    ]


def _line(rows: list[measured.Row], variant: str, colour: int, condition: str, column: str) -> Line:
    return Line(_curve(rows, variant, condition, column), VARIANTS[variant], colour)


def _curve(rows: list[measured.Row], variant: str, condition: str, column: str) -> Curve:
    own = [row for row in rows if (row["variant"], row["condition"]) == (variant, condition) and row[column] is not None]
    if not own:
        raise measured.MeasuredError(f"no {column} of {variant} under {condition}")
    newest = max(str(row["date"]) for row in own)
    found = sorted((float(row["step"]), float(row[column])) for row in own if row["date"] == newest)
    return Curve(*np.array(found).T)


def main(args: list[str]) -> int:
    """Write or check."""
    return picture.publish(NAME, TARGET, lambda rows: picture.compose(charts(rows)), "--check" in args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
