"""The report's pictures: which figures of the runs are drawn, and how. Plain data in, drawings out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from markupsafe import Markup

from laneway.report import heatmap
from laneway.report.chart import Chart, Line, Mark, draw
from laneway.report.heatmap import Heat, HeatChart, colour_scale
from laneway.report.numbers import binary_unit
from laneway.report.palette import run_style
from laneway.report.runs import Run
from laneway.report.series import Curve

# With more runs than this the unsmoothed values would only hide the curves.
RAW_UP_TO = 4
MARKS_PER_RUN = 60


@dataclass(frozen=True)
class Key:
    """One entry of a figure's legend that stands for no curve."""

    label: str
    colour: int
    kind: str
    dash: str = "none"


@dataclass
class Figure:
    """One drawing with its caption."""

    title: str
    unit: str
    drawings: list[Markup]
    note: str = ""
    keys: Sequence[Line | Key] = ()
    """What the figure's own legend explains."""


@dataclass(frozen=True)
class Quantity:
    """One scalar of the metrics rows and how its axis looks."""

    key: str
    title: str
    unit: str = ""
    note: str = ""
    low: float | None = None
    high: float | None = None
    log: bool | None = None
    least_span: float = 0.0
    reference: float | None = None
    smooth: bool = False
    binary: bool = False
    """In bytes: drawn in KiB, MiB, …"""
    short: str = ""
    """Title where the quantity is drawn over depth."""


OPTIMISATION = (
    Quantity("lr", "Learning rate", low=0.0, log=False),
    Quantity("grad_norm", "Gradient norm", "before clipping", low=0.0, smooth=True),
)
SPEED = (
    Quantity("tokens_per_s", "Throughput", "tokens/s", low=0.0, smooth=True),
    Quantity("step_ms", "Step time", "ms", low=0.0, smooth=True),
    Quantity("peak_bytes", "Peak memory", low=0.0, log=False, binary=True),
)
ERROR = {"low": 0.0, "least_span": 0.01}
MEMORY = (
    Quantity("memory_peak_bytes", "Managed peak", low=0.0, log=False, binary=True),
    Quantity("memory_peak_error", "Peak against prediction", "share", "above 0: more than predicted", log=False, **ERROR),
    Quantity("memory_stall_seconds", "Stalls", "s", "the computation waited for transfers", low=0.0, log=False),
    Quantity("memory_recompute_seconds", "Recomputation", "s", low=0.0, log=False),
    Quantity("memory_bytes_out", "Moved out", low=0.0, log=False, binary=True),
    Quantity("memory_bytes_in", "Moved back", low=0.0, log=False, binary=True),
    Quantity("memory_misses", "Misses", "", "asked for before they were on their way back", low=0.0, log=False, least_span=1.0),
)
GAIN = {"low": 1.0, "least_span": 0.1, "reference": 1.0}
FORWARD = "largest amplification of the streams over all sites; dotted: 1"
BACKWARD = "the same for their gradients, head to embedding"
STREAMS = (
    Quantity("gain_forward", "Composite gain, forward", "", FORWARD, short="Forward gain", **GAIN),
    Quantity("gain_backward", "Composite gain, backward", "", BACKWARD, short="Backward gain", **GAIN),
    Quantity(
        "collapse", "Stream collapse", "mean cosine", "1: all streams say the same", high=1.0, least_span=0.02, short="Collapse"
    ),
    Quantity(
        "sinkhorn_error", "Sinkhorn error", "max |log column sum|", "0: H_res is doubly stochastic", low=0.0, least_span=1e-6
    ),
    Quantity("res_entropy", "Entropy of H_res", "nats", "0: streams pass unmixed", low=0.0, least_span=1e-3),
)
DEPTH = (STREAMS[0], STREAMS[1], STREAMS[2])


def loss_figures(runs: list[Run]) -> Iterator[Figure]:
    """Loss in nats (large, with the events marked) and in bits per byte."""
    marks = [mark for index, run in enumerate(runs) for mark in event_marks(run, index, len(runs) > 1)]
    for key, title, unit in (("loss", "Loss", "nats per token"), ("bits_per_byte", "Bits per byte", "")):
        lines = _loss_lines(runs, key)
        main = key == "loss"
        # On a logarithmic axis the fall of the first steps leaves room for the rest, and a power law bends less.
        chart = Chart(title, unit, lines, marks=marks if main else [], log=True)
        if chart.drawable:
            shapes = ((560, 310, "for-wide"), (360, 250, "for-narrow"))
            name = f"loss-{key}"
            drawings = [draw(chart, f"{name}-{css}", width, height, css) for width, height, css in shapes]
            yield Figure(title, unit, drawings, _loss_note(runs, marks if main else []), lines if len(runs) == 1 else [])


def _loss_lines(runs: list[Run], key: str) -> list[Line]:
    lines = []
    for index, run in enumerate(runs):
        colour, dash = run_style(index)
        raw, validation = run.curve(key), run.curve(f"val_{key}")
        prefix = f"{run.name}: " if len(runs) > 1 else ""
        if len(runs) <= RAW_UP_TO:
            lines.append(Line(raw, f"{prefix}training, every row", colour, kind="faint"))
        lines.append(Line(raw.smooth(), f"{prefix}training", colour, dash))
        points = colour if len(runs) > 1 else colour + 1
        lines.append(Line(validation, f"{prefix}validation", points, dash if len(runs) > 1 else "none", "points"))
    return [line for line in lines if line.curve.drawable]


def _loss_note(runs: list[Run], marks: list[Mark]) -> str:
    parts = []
    if len(runs) > 1:
        faint = "faint: every row; " if len(runs) <= RAW_UP_TO else ""
        parts.append(f"{faint}line: smoothed training; dots: validation")
    signs = {"checkpoint": "▲ checkpoint", "nonfinite": "× skipped step", "": "▼ other event"}
    kinds = {mark.kind if mark.kind in signs else "" for mark in marks}
    parts += [sign for kind, sign in signs.items() if kind in kinds]
    return "; ".join(parts)


def event_marks(run: Run, index: int, several: bool) -> list[Mark]:
    """Marks of the events that interrupt or change a run, spread evenly where there are more than ``MARKS_PER_RUN`` of a kind."""
    by_kind: dict[str, list[Mark]] = {}
    for event in run.events:
        kind, step = str(event.get("kind")), event.get("step")
        if kind in ("start", "sample", "finish") or isinstance(step, bool) or not isinstance(step, int | float):
            continue
        if math.isfinite(step):
            label = f"{run.name + ': ' if several else ''}{kind} at step {step:g}"
            by_kind.setdefault(kind, []).append(Mark(float(step), label, kind, run_style(index)[0]))
    marks = []
    for found in by_kind.values():
        keep = np.unique(np.linspace(0, len(found) - 1, min(len(found), MARKS_PER_RUN)).round().astype(int))
        marks += [found[i] for i in keep]
    return marks


def scalar_figures(runs: list[Run], quantities: tuple[Quantity, ...]) -> Iterator[Figure]:
    """One chart a quantity with a curve a run; quantities that no run recorded are left out."""
    for quantity in quantities:
        curves = [run.curve(quantity.key) for run in runs]
        if quantity.binary:
            quantity, curves = _in_binary_units(quantity, curves)
        lines = []
        for index, (run, curve) in enumerate(zip(runs, curves, strict=True)):
            colour, dash = run_style(index)
            if quantity.smooth and len(runs) <= RAW_UP_TO:
                lines.append(Line(curve, f"{run.name}, every row", colour, kind="faint"))
            lines.append(Line(curve.smooth() if quantity.smooth else curve, run.name, colour, dash))
        yield from _figure(quantity, lines, f"scalar-{quantity.key}")


def depth_figures(runs: list[Run]) -> Iterator[Figure]:
    """Per-site figures at each run's last probe, over depth."""
    for quantity in DEPTH:
        lines = []
        for index, run in enumerate(runs):
            heat = run.heat(f"site_{quantity.key}")
            if heat is not None:
                last = int(np.flatnonzero(np.isfinite(heat.values).any(1))[-1])
                curve = Curve(np.arange(heat.values.shape[1], dtype=float), heat.values[last])
                lines.append(Line(curve, f"{run.name}, step {heat.steps[last]:.0f}", *run_style(index)))
        over_depth = replace(quantity, title=f"{quantity.short} by site", note="at the last probe")
        yield from _figure(over_depth, lines, f"depth-{quantity.key}", x_title="site", whole_x=True)


def heat_figures(runs: list[Run]) -> Iterator[Figure]:
    """Depth × time as heat maps: one a run, all runs of a quantity on one colour scale."""
    for quantity in DEPTH:
        found = [(run, heat) for run in runs if (heat := run.heat(f"site_{quantity.key}")) is not None]
        if not found:
            continue
        color = colour_scale([heat for _, heat in found], quantity.log, quantity.low, quantity.high, quantity.least_span)
        for number, (run, heat) in enumerate(found):
            title, name = f"{quantity.short}, depth × time", run.name if len(runs) > 1 else ""
            drawing = heatmap.draw(HeatChart(f"{title}: {name}" if name else title, heat, color), f"heat-{quantity.key}-{number}")
            yield Figure(title, quantity.unit, [drawing], ": ".join(filter(None, [name, _missing(heat)])))


def _missing(heat: Heat) -> str:
    blank = int((~np.isfinite(heat.values)).sum())
    return f"{blank} cells without a finite value are left blank" if blank else ""


def _figure(quantity: Quantity, lines: list[Line], name: str, x_title: str = "step", whole_x: bool = False) -> Iterator[Figure]:
    chart = Chart(
        quantity.title,
        quantity.unit,
        lines,
        x_title=x_title,
        whole_x=whole_x,
        log=quantity.log,
        low=quantity.low,
        high=quantity.high,
        least_span=quantity.least_span,
        reference=quantity.reference,
    )
    if chart.drawable:
        yield Figure(quantity.title, quantity.unit, [draw(chart, name)], quantity.note)


def _in_binary_units(quantity: Quantity, curves: list[Curve]) -> tuple[Quantity, list[Curve]]:
    finite = [curve.y[np.isfinite(curve.y)] for curve in curves]
    divisor, unit = binary_unit(max((float(y.max()) for y in finite if len(y)), default=1.0))
    return replace(quantity, unit=unit), [Curve(curve.x, curve.y / divisor) for curve in curves]
