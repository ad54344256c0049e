"""Line charts: curves, points and event marks over steps, on axes with round ticks."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import numpy as np
from markupsafe import Markup

from laneway.report.scale import Scale, linear_ticks, make_scale, tick_labels
from laneway.report.series import Curve
from laneway.report.svg import element, group, path

# Room around the plot in pixels: left for tick labels, right for half a label, top for marks, bottom for ticks and title.
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 14, 36


@dataclass(frozen=True)
class Line:
    """One curve of a chart."""

    curve: Curve
    label: str
    colour: int = 0
    dash: str = "none"
    kind: str = "line"
    """line: a full stroke · faint: raw values behind it · points: dots joined by a thin stroke"""


@dataclass(frozen=True)
class Mark:
    """An event at a step: a thin vertical line with a sign at its top."""

    step: float
    label: str
    kind: str
    colour: int = 0


@dataclass(frozen=True)
class Chart:
    """What to draw, without a size."""

    title: str
    unit: str
    lines: list[Line]
    x_title: str = "step"
    marks: list[Mark] = field(default_factory=list)
    log: bool | None = None
    low: float | None = None
    high: float | None = None
    least_span: float = 0.0
    reference: float | None = None
    """A level to compare with, drawn as a dotted line where it lies on the axis."""
    whole_x: bool = False
    """x counts things (sites): ticks at whole numbers only."""
    fine_x: bool = False
    """x measures something (time): read out with its decimals."""

    @property
    def drawable(self) -> bool:
        """Whether any line has anything to draw."""
        return any(line.curve.drawable for line in self.lines)


def draw(chart: Chart, identifier: str, width: int = 360, height: int = 220, css: str = "") -> Markup:
    """The chart as an ``<svg>`` with title and description; ``identifier`` must be unique in the page."""
    lines = [line for line in chart.lines if line.curve.drawable]
    x = make_scale([line.curve.x for line in lines] + [np.array([m.step for m in chart.marks])], (LEFT, width - RIGHT), log=False)
    x = _tight(x, lines)
    y = make_scale(
        [line.curve.y for line in lines],
        (height - BOTTOM, TOP),
        log=chart.log,
        low=chart.low,
        high=chart.high,
        least_span=chart.least_span,
    )
    order = {"faint": 0, "line": 1, "points": 2}
    body = [
        _axes(chart, x, y, width, height),
        _reference(chart, x, y),
        group([_mark(mark, x, y) for mark in chart.marks], class_="marks"),
        group([_line(line, x, y) for line in sorted(lines, key=lambda line: order[line.kind])], class_="curves"),
    ]
    return element(
        "svg",
        element("title", f"{chart.title} ({chart.unit})" if chart.unit else chart.title, id=f"{identifier}-t"),
        element("desc", describe(chart), id=f"{identifier}-d"),
        *body,
        class_=f"chart {css}".strip(),
        viewBox=f"0 0 {width} {height}",
        role="img",
        aria_labelledby=f"{identifier}-t {identifier}-d",
        data_plot=json.dumps(_plot_data(chart, x, y)),
    )


def _tight(x: Scale, lines: list[Line]) -> Scale:
    """The x axis without air at its ends: curves begin at the frame."""
    parts = [line.curve.x for line in lines if len(line.curve)]
    if not parts:
        return x
    low, high = min(float(p.min()) for p in parts), max(float(p.max()) for p in parts)
    if low == high:
        low, high = low - 1, high + 1
    return Scale(low, high, x.start, x.stop)


def _plot_data(chart: Chart, x: Scale, y: Scale) -> dict[str, object]:
    """What the read-out script needs to turn pixels back into values."""
    ends = {name: [s.low, s.high, s.start, s.stop] for name, s in (("x", x), ("y", y))}
    return {**ends, "log": y.log, "unit": chart.unit, "xTitle": chart.x_title, "fineX": chart.fine_x}


def _axes(chart: Chart, x: Scale, y: Scale, width: int, height: int) -> Markup:
    parts = []
    y_ticks = y.ticks(max(3, round((height - TOP - BOTTOM) / 45)))
    for value, label in zip(y_ticks, tick_labels(y_ticks, y.log), strict=True):
        at = y(value)
        parts.append(element("line", class_="grid", x1=x.start, x2=x.stop, y1=at, y2=at))
        parts.append(element("text", label, class_="tick", x=LEFT - 6.0, y=at + 4.0, text_anchor="end"))
    x_ticks = linear_ticks(x.low, x.high, max(3, width // 85))
    if chart.whole_x:
        x_ticks = [value for value in x_ticks if value == round(value)]
    base = float(height - BOTTOM)
    parts.append(element("line", class_="axis", x1=x.start, x2=x.stop, y1=base, y2=base))
    for value, label in zip(x_ticks, tick_labels(x_ticks, False), strict=True):
        at = x(value)
        anchor = "end" if at > width - 24 else "middle"
        parts.append(element("line", class_="axis", x1=at, x2=at, y1=base, y2=base + 4))
        parts.append(element("text", label, class_="tick", x=min(at, width - 4.0), y=base + 16, text_anchor=anchor))
    parts.append(element("text", chart.x_title, class_="axis-title", x=x.stop, y=height - 4.0, text_anchor="end"))
    if y.log:
        parts.append(element("text", "log scale", class_="axis-title", x=2.0, y=height - 4.0))
    return group(parts, class_="axes", aria_hidden="true")


def _reference(chart: Chart, x: Scale, y: Scale) -> Markup | None:
    if chart.reference is None or not y.low <= chart.reference <= y.high:
        return None
    at = y(chart.reference)
    return element("line", class_="reference", x1=x.start, x2=x.stop, y1=at, y2=at)


def _line(line: Line, x: Scale, y: Scale) -> Markup:
    thin = line.curve.thin()
    pixels = [([x(v) for v in xs], [y(v) for v in ys]) for xs, ys in thin.segments()]
    stroke = element(
        "path",
        d=path(pixels),
        class_=f"curve {line.kind} c{line.colour}",
        stroke_dasharray=None if line.dash == "none" or line.kind == "faint" else line.dash,
        data_label=line.label,
    )
    if line.kind != "points":
        return stroke
    dots = [element("circle", cx=px, cy=py, r=2.6) for xs, ys in pixels for px, py in zip(xs, ys, strict=True)]
    return group([stroke, group(dots, class_=f"dots c{line.colour}")])


def _mark(mark: Mark, x: Scale, y: Scale) -> Markup:
    at = x(mark.step)
    top, base = y.stop, y.start
    sign = {
        "checkpoint": f"M{at:.1f} {base - 5:.1f}l3.5 5h-7z",
        "nonfinite": f"M{at - 3.5:.1f} {top - 9:.1f}l7 7m0 -7l-7 7",
    }.get(mark.kind, f"M{at:.1f} {top - 1:.1f}l-4 -7h8z")
    parts = [element("title", mark.label)]
    if mark.kind != "checkpoint":
        parts.append(element("line", x1=at, x2=at, y1=top, y2=base))
    parts.append(element("path", d=sign))
    return group(parts, class_=f"mark {mark.kind if mark.kind in ('checkpoint', 'nonfinite') else 'event'} c{mark.colour}")


def describe(chart: Chart) -> str:
    """One sentence a curve: where it begins, where it ends, its range."""
    sentences, form = [], ".4g" if chart.fine_x else ".0f"
    for line in chart.lines:
        finite = np.flatnonzero(np.isfinite(line.curve.y))
        if line.kind == "faint" or not len(finite):
            continue
        x, y = line.curve.x[finite], line.curve.y[finite]
        sentences.append(
            f"{line.label}: from {y[0]:.4g} at {chart.x_title} {x[0]:{form}} to {y[-1]:.4g} at {x[-1]:{form}}, "
            f"between {y.min():.4g} and {y.max():.4g}."
        )
    return " ".join(sentences) or "Nothing to draw."
