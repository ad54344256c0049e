"""A plan as a picture: one bar a saved tensor, from its save until it is freed, as thick as it is large."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from laneway.report.memory import CHOICES, Life, Plan
from laneway.report.numbers import count, figure, size
from laneway.report.scale import Scale, linear_ticks, tick_labels
from laneway.report.svg import element, group
from laneway.report.tables import printable

BAR_LIMIT, SINGLE = 80, 60
LEFT, RIGHT, TOP, BOTTOM = 12, 12, 8, 38
GAP, THINNEST, THICKEST = 0.6, 1.6, 24.0
COLOURS = {"keep": 2, "move": 0, "recompute": 1}  # of the runs' palette; the away parts differ in shape too


@dataclass(frozen=True)
class Bar:
    """Saved tensors drawn as one.

    Attributes:
        label: what they are.
        tensors: how many.
        begin, end: their first save and the last time one is freed, on the axis.
        away: while none of them is needed on the device: from the last save to the first use; None for what is kept.
    """

    label: str
    choice: str
    nbytes: float
    tensors: int
    begin: float
    end: float
    away: tuple[float, float] | None


@dataclass(frozen=True)
class Axis:
    """Where the events of a plan lie: at their times where time passes, else at their numbers."""

    places: np.ndarray
    unit: str

    @classmethod
    def of(cls, plan: Plan) -> Axis:
        """The places after each event."""
        factor, unit = time_unit(plan.times)
        if len(plan.times) and plan.times[-1] > plan.times[0]:
            return cls(plan.times * factor, unit)
        last = max((max(life.save, life.use, life.free) for life in plan.lives), default=0)
        return cls(np.arange(min(last, 1 << 20) + 2, dtype=float), "")

    def after(self, event: int) -> float:
        """Where this event has happened."""
        return float(self.places[min(event + 1, len(self.places) - 1)])


def time_unit(seconds: np.ndarray) -> tuple[float, str]:
    """Factor and name of the unit that suits these times."""
    longest = float(seconds.max()) if len(seconds) else 0.0
    return next(
        ((f, name) for f, name in ((1.0, "s"), (1e3, "ms")) if longest * f >= 1.0), (1e6, "µs") if longest else (1.0, "s")
    )


def bars(plan: Plan, axis: Axis) -> list[Bar]:
    """At most ``BAR_LIMIT`` bars in order of saving: the largest tensors singly, the rest with their neighbours of one choice."""
    order = sorted(range(len(plan.lives)), key=lambda at: -plan.lives[at].nbytes)
    single = set(order if len(order) <= BAR_LIMIT else order[:SINGLE])
    groups = [[plan.lives[at]] for at in sorted(single)]
    rest = [life for at, life in enumerate(plan.lives) if at not in single]
    for choice in CHOICES:
        small = [life for life in rest if life.choice == choice]
        if small:
            # Shares of what is left, each at least one: rounding down keeps their sum within the limit.
            parts = 1 + (BAR_LIMIT - SINGLE - len(CHOICES)) * len(small) // len(rest)
            groups += [[small[at] for at in part] for part in np.array_split(np.arange(len(small)), min(parts, len(small)))]
    return [_bar(lives, axis) for lives in sorted(groups, key=lambda lives: lives[0].save)]


def _bar(lives: list[Life], axis: Axis) -> Bar:
    choice, nbytes = lives[0].choice, sum(life.nbytes for life in lives)
    saves = [axis.after(life.save) for life in lives]
    frees = [axis.after(life.free) if life.free >= 0 else float(axis.places[-1]) for life in lives]
    uses = [axis.after(life.use) if life.use >= 0 else free for life, free in zip(lives, frees, strict=True)]
    begin, end = min(saves), max(*saves, *frees, *uses)
    gone = (max(saves), min(uses))
    away = gone if choice != "keep" and gone[1] > gone[0] else None
    name = printable(lives[0].name) or "outside of modules"
    names = f"{len(lives)} small tensors from {name} on" if len(lives) > 1 else name
    unit = f"\u202f{axis.unit}" if axis.unit else ""
    told = f"saved at {figure(begin)}{unit}, used from {figure(min(uses))}{unit}, freed by {figure(end)}{unit}"
    if not axis.unit:
        told = told.replace("at ", "at event ", 1)
    return Bar(f"{names}: {size(nbytes)}, {choice}; {told}", choice, nbytes, len(lives), begin, end, away)


def draw(title: str, plan: Plan, identifier: str, width: int = 560, height: int = 310, css: str = "") -> Markup:
    """The picture as an ``<svg>``; what is saved first is on top."""
    axis = Axis.of(plan)
    found = bars(plan, axis)
    edges = _edges([bar.nbytes for bar in found], height - TOP - BOTTOM)
    bottom = edges[-1][1] if edges else TOP
    low, high = float(axis.places[0]), max([float(axis.places[-1]), *(bar.end for bar in found)])
    x = Scale(low, high if high > low else low + 1.0, LEFT, width - RIGHT)
    parts = [_drawn(bar, x, top, low_edge) for bar, (top, low_edge) in zip(found, edges, strict=True)]
    return element(
        "svg",
        element("title", title, id=f"{identifier}-t"),
        element("desc", describe(plan, found), id=f"{identifier}-d"),
        _axes(x, axis, bottom + 3, width),
        group(parts),
        class_=f"lives {css}".strip(),
        viewBox=f"0 0 {width} {bottom + BOTTOM:.0f}",
        role="img",
        aria_labelledby=f"{identifier}-t {identifier}-d",
    )


def _edges(sizes: list[float], room: float) -> list[tuple[float, float]]:
    """Top and bottom of each bar: a part for being there, the rest by bytes."""
    largest, spare = max(sizes, default=0.0), max(0.0, room - len(sizes) * (GAP + THINNEST))
    total = math.fsum(nbytes / largest for nbytes in sizes) if largest else 1.0
    edges, top = [], float(TOP)
    for nbytes in sizes:
        thick = min(THICKEST, THINNEST + spare * (nbytes / largest / total if largest else 0.0))
        edges.append((top, top + thick))
        top += thick + GAP
    return edges


def _drawn(bar: Bar, x: Scale, top: float, bottom: float) -> Markup:
    here = [(bar.begin, bar.end)] if bar.away is None else [(bar.begin, bar.away[0]), (bar.away[1], bar.end)]
    parts = [element("title", bar.label)]
    if bar.away is not None and bar.choice == "recompute":
        middle = (top + bottom) / 2
        parts.append(element("line", class_="gone", x1=x(bar.away[0]), x2=x(bar.away[1]), y1=middle, y2=middle))
    elif bar.away is not None:
        parts.append(_box(x, *bar.away, top, bottom, "away"))
    parts += [_box(x, begin, end, top, bottom, "held") for begin, end in here]
    return group(parts, class_=f"bar {bar.choice} c{COLOURS[bar.choice]}")


def _box(x: Scale, begin: float, end: float, top: float, bottom: float, css: str) -> Markup:
    wide = max(x(end) - x(begin), 0.8 if css == "held" else 0.0)  # a moment on the device is still to be seen
    return element("rect", class_=css, x=x(begin), y=top, width=wide, height=bottom - top)


def _axes(x: Scale, axis: Axis, base: float, width: int) -> Markup:
    parts = [element("line", class_="axis", x1=x.start, x2=x.stop, y1=base, y2=base)]
    ticks = linear_ticks(x.low, x.high, max(3, width // 85))
    for value, label in zip(ticks, tick_labels(ticks, False), strict=True):
        at = x(value)
        anchor = "end" if at > width - 24 else "start" if at < 24 else "middle"
        parts.append(element("line", class_="axis", x1=at, x2=at, y1=base, y2=base + 4))
        parts.append(element("text", label, class_="tick", x=at, y=base + 16, text_anchor=anchor))
    title = f"{axis.unit} into the pass" if axis.unit else "event"
    parts.append(element("text", title, class_="axis-title", x=x.stop, y=base + 29, text_anchor="end"))
    return group(parts, class_="axes", aria_hidden="true")


def describe(plan: Plan, found: list[Bar]) -> str:
    """How many tensors and bytes each choice has, and the largest."""
    parts = []
    for choice in CHOICES:
        lives = [life for life in plan.lives if life.choice == choice]
        if lives:
            parts.append(f"{choice}: {count(len(lives))} tensors, {size(sum(life.nbytes for life in lives))}.")
    if found:
        parts.append(f"Largest: {max(found, key=lambda bar: bar.nbytes).label}.")
    return " ".join(parts) or "No tensor was saved."
