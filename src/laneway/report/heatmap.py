"""Heat maps over depth and time: one cell a site and probe, colour by value, one scale for all runs of a comparison."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from laneway.report.palette import RAMP_LEVELS, ramp
from laneway.report.scale import Scale, make_scale, tick_labels
from laneway.report.svg import element, group, number

LEFT, RIGHT, TOP, BOTTOM = 30, 60, 10, 36
COLUMN_LIMIT = 120


@dataclass(frozen=True)
class Heat:
    """Values [probes, sites] at steps [probes]."""

    steps: np.ndarray
    values: np.ndarray

    @classmethod
    def of(cls, sites: tuple[list[int], list[list[float]]]) -> Heat:
        """From ``rundir.site_columns``, thinned to ``COLUMN_LIMIT`` probes that are spread evenly and hold both ends."""
        steps, values = np.asarray(sites[0], dtype=float), np.asarray(sites[1], dtype=float)
        if len(steps) > COLUMN_LIMIT:
            index = np.unique(np.linspace(0, len(steps) - 1, COLUMN_LIMIT).round().astype(int))
            steps, values = steps[index], values[index]
        return cls(steps, values)

    @property
    def drawable(self) -> bool:
        """Whether there is anything finite to draw."""
        return bool(np.isfinite(self.values).any())


@dataclass(frozen=True)
class HeatChart:
    """What to draw: ``color`` maps values to 0 … 1."""

    title: str
    heat: Heat
    color: Scale
    rows: str = "site"
    """What a row of the map is."""


def colour_scale(heats: list[Heat], log: bool | None, low: float | None, high: float | None, least_span: float) -> Scale:
    """One scale for several heat maps, from 0 to 1 and without air at its ends."""
    pool = [heat.values.ravel() for heat in heats]
    scale = make_scale(pool, (0.0, 1.0), log=log, low=low, high=high, least_span=least_span)
    finite = np.concatenate(pool)
    finite = finite[np.isfinite(finite)].clip(scale.low, scale.high)
    bottom, top = float(finite.min()), float(finite.max())
    bottom, top = min(bottom, low if low is not None else bottom), max(top, high if high is not None else top)
    if top - bottom < least_span:
        bottom, top = (top - least_span, top) if high is not None else (bottom, bottom + least_span)
    return Scale(bottom, top, 0.0, 1.0, log=scale.log) if top > bottom else scale


def draw(chart: HeatChart, identifier: str, width: int = 360, height: int = 220) -> Markup:
    """The heat map as an ``<svg>``; sites grow upwards, as the network does."""
    heat, sites = chart.heat, chart.heat.values.shape[1]
    plot_width, plot_height = width - LEFT - RIGHT, height - TOP - BOTTOM
    edges_x = _edges(heat.steps, LEFT, LEFT + plot_width)
    edges_y = [TOP + plot_height * (1 - i / sites) for i in range(sites + 1)]
    return element(
        "svg",
        element("title", chart.title, id=f"{identifier}-t"),
        element("desc", describe(chart), id=f"{identifier}-d"),
        _cells(chart, edges_x, edges_y),
        element("rect", class_="frame", x=LEFT, y=TOP, width=plot_width, height=plot_height),
        _axes(heat, edges_x, edges_y, height, chart.rows),
        _colour_bar(chart.color, width, plot_height),
        class_="heat",
        viewBox=f"0 0 {width} {height}",
        role="img",
        aria_labelledby=f"{identifier}-t {identifier}-d",
        data_heat=json.dumps(
            {
                "x": [round(edge, 2) for edge in edges_x],
                "y": [round(edge, 2) for edge in edges_y],
                "rows": chart.rows,
                "steps": [int(step) for step in heat.steps],
                "values": [[float(f"{v:.4g}") if math.isfinite(v) else None for v in row] for row in heat.values.tolist()],
            },
            separators=(",", ":"),
        ),
    )


def _edges(steps: np.ndarray, start: float, stop: float) -> list[float]:
    """Pixel edges of the columns: half-way between neighbouring probes."""
    if len(steps) == 1:
        return [start, stop]
    middle = (steps[1:] + steps[:-1]) / 2
    return [start, *(start + (stop - start) * (middle - steps[0]) / (steps[-1] - steps[0])).tolist(), stop]


def _cells(chart: HeatChart, edges_x: list[float], edges_y: list[float]) -> Markup:
    """All cells of one colour in one path; neighbours in time of the same colour are one rectangle."""
    levels: dict[int, list[str]] = {}
    for site in range(len(edges_y) - 1):
        column = [
            round(chart.color(v) * (RAMP_LEVELS - 1)) if math.isfinite(v) else -1 for v in chart.heat.values[:, site].tolist()
        ]
        begin = 0
        for end in range(1, len(column) + 1):
            if end < len(column) and column[end] == column[begin]:
                continue
            wide, high = edges_x[end] - edges_x[begin], edges_y[site] - edges_y[site + 1]
            if column[begin] >= 0:
                rectangle = (
                    f"M{number(edges_x[begin])} {number(edges_y[site + 1])}h{number(wide)}v{number(high)}h{number(-wide)}z"
                )
                levels.setdefault(column[begin], []).append(rectangle)
            begin = end
    paths = [element("path", d="".join(d), fill=ramp(k / (RAMP_LEVELS - 1))) for k, d in sorted(levels.items())]
    return group(paths, class_="cells", shape_rendering="crispEdges")


def _axes(heat: Heat, edges_x: list[float], edges_y: list[float], height: int, rows: str) -> Markup:
    parts = []
    base, sites = edges_y[0], len(edges_y) - 1
    every = max(1, math.ceil(sites / 9))
    for site in range(0, sites, every):
        middle = (edges_y[site] + edges_y[site + 1]) / 2
        parts.append(element("text", str(site), class_="tick", x=LEFT - 6.0, y=middle + 4.0, text_anchor="end"))
    low, high = float(heat.steps[0]), float(heat.steps[-1])
    if high > low:
        scale = Scale(low, high, edges_x[0], edges_x[-1])
        ticks = scale.ticks(4)
        for value, label in zip(ticks, tick_labels(ticks, False), strict=True):
            at = scale(value)
            parts.append(element("line", class_="axis", x1=at, x2=at, y1=base, y2=base + 4))
            parts.append(element("text", label, class_="tick", x=at, y=base + 16, text_anchor="middle"))
    else:
        middle = (edges_x[0] + edges_x[-1]) / 2
        parts.append(element("text", f"{low:.0f}", class_="tick", x=middle, y=base + 16, text_anchor="middle"))
    parts.append(element("text", "step", class_="axis-title", x=edges_x[-1], y=height - 4.0, text_anchor="end"))
    parts.append(element("text", f"{rows} ↑", class_="axis-title", x=2.0, y=height - 4.0))
    return group(parts, class_="axes", aria_hidden="true")


def _colour_bar(color: Scale, width: int, plot_height: int) -> Markup:
    left, steps = width - RIGHT + 12.0, 24
    bar = Scale(color.low, color.high, TOP + plot_height, TOP, log=color.log)
    parts = [
        element(
            "rect",
            x=left,
            y=TOP + plot_height * (1 - (i + 1) / steps),
            width=10.0,
            height=plot_height / steps + 0.5,
            fill=ramp(i / (steps - 1)),
        )
        for i in range(steps)
    ]
    ticks = bar.ticks(5)
    for value, label in zip(ticks, tick_labels(ticks, bar.log), strict=True):
        parts.append(element("text", label, class_="tick", x=left + 14, y=bar(value) + 4.0))
    return group(parts, class_="colour-bar", aria_hidden="true")


def describe(chart: HeatChart) -> str:
    """Range and place of the largest value, and the last probe's deepest site."""
    values = chart.heat.values
    finite = np.isfinite(values)
    if not finite.any():
        return "Nothing to draw."
    probe, site = np.unravel_index(np.where(finite, values, -np.inf).argmax(), values.shape)
    return (
        f"{values.shape[1]} {chart.rows}s over {values.shape[0]} probes; between {values[finite].min():.4g} and "
        f"{values[finite].max():.4g}, largest at step {chart.heat.steps[probe]:.0f}, {chart.rows} {site}."
    )
