"""The schedule section of the report: where each task of a run ran, over the steps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

from laneway.report import palette
from laneway.report.figures import Figure
from laneway.report.memory_figures import Table
from laneway.report.numbers import count
from laneway.report.runs import Run
from laneway.report.scale import Scale, linear_ticks, tick_labels
from laneway.report.svg import element, group
from laneway.report.tables import printable
from laneway.rundir import number

__all__ = ["decisions", "described", "draw", "figures", "lanes", "tables"]

LANE, BAR, LEFT, RIGHT, TOP, WIDTH = 46, 20, 8, 12, 6, 860
LABEL_FROM = 60.0
"""Pixels of a segment from which its place is written on it."""


@dataclass(frozen=True)
class Stay:
    """A task in a place, from a step until before another."""

    place: str
    begin: int
    end: int
    reason: str


@dataclass(frozen=True)
class Decided:
    """One event: where the tasks that were due ran from ``step`` on."""

    step: int
    places: dict[str, str]
    reason: str


def decisions(run: Run) -> list[Decided]:
    """The run's decisions by step. Of a part of the run that a resume did again, the later ones."""
    found: list[Decided] = []
    for event in run.events:
        step = number(event.get("step"))
        if event.get("kind") == "resume" and math.isfinite(step):
            found = [decided for decided in found if decided.step <= step]
        elif event.get("kind") == "schedule" and math.isfinite(step) and isinstance(event.get("places"), dict):
            places = {printable(str(task)): printable(str(place)) for task, place in event["places"].items()}
            found.append(Decided(int(step), places, printable(str(event.get("reason", "")))))
    return sorted(found, key=lambda decided: decided.step)


def lanes(run: Run) -> dict[str, list[Stay]]:
    """For each task its stays, in order."""
    found, end = decisions(run), _last_step(run) + 1
    stays: dict[str, list[Stay]] = {}
    for task in dict.fromkeys(task for decided in found for task in decided.places):
        by_step = {d.step: (d.places[task], d.reason) for d in found if task in d.places}
        moves = [(step, place, reason) for step, (place, reason) in by_step.items()]
        kept = [move for at, move in enumerate(moves) if not at or move[1] != moves[at - 1][1]]
        edges = [*(step for step, _, _ in kept), max(end, kept[-1][0] + 1)]
        stays[task] = [Stay(p, a, b, r) for (_, p, r), (a, b) in zip(kept, pairwise(edges), strict=True) if b > a]
    return stays


def figures(runs: list[Run]) -> Iterator[Figure]:
    """One picture for each run with scheduled tasks."""
    for index, run in enumerate(runs):
        if found := lanes(run):
            note = f"{run.name}: " if len(runs) > 1 else ""
            changes = sum(max(0, len(stays) - 1) for stays in found.values())
            text = printable(f"{note}{count(changes)} changes; a colour is a place of its task")
            yield Figure("Where tasks ran", "", [draw(found, f"schedule-{index}")], text)


def tables(runs: list[Run]) -> list[Table]:
    """Steps of each task in each place."""
    found = []
    for run in runs:
        rows = []
        for task, stays in lanes(run).items():
            steps: Counter[str] = Counter()
            for stay in stays:
                steps[stay.place] += stay.end - stay.begin
            for place, held in steps.items():
                reasons = Counter(stay.reason for stay in stays if stay.place == place)
                told = ", ".join(f"{reason} {count(times)}" for reason, times in reasons.items())
                rows.append([task, place, count(held), told])
        if rows:
            title = "Places" if len(runs) == 1 else f"Places: {run.name}"
            found.append(Table(title, ["Task", "Place", "Steps", "Chosen as"], rows, ["", "", "num", "detail"]))
    return found


def draw(found: dict[str, list[Stay]], identifier: str) -> Markup:
    """The picture as an ``<svg>``: one row a task, a bar for each stay."""
    begin = min(stay.begin for stays in found.values() for stay in stays)
    end = max(stay.end for stays in found.values() for stay in stays)
    x = Scale(float(begin), float(end), float(LEFT), float(WIDTH - RIGHT))
    rows = [_lane(task, stays, x, TOP + at * LANE) for at, (task, stays) in enumerate(found.items())]
    foot = TOP + len(rows) * LANE + 6
    return element(
        "svg",
        element("title", "Where tasks ran", id=f"{identifier}-t"),
        element("desc", described(found), id=f"{identifier}-d"),
        *rows,
        _axis(x, float(foot)),
        class_="plan",
        viewBox=f"0 0 {WIDTH} {foot + 36}",
        role="img",
        aria_labelledby=f"{identifier}-t {identifier}-d",
    )


def described(found: dict[str, list[Stay]]) -> str:
    """The picture in words, the first stays of each task."""
    parts = []
    for task, stays in found.items():
        told = ", ".join(f"{stay.place} from step {count(stay.begin)}" for stay in stays[:8])
        parts.append(f"{task}: {told}{', …' if len(stays) > 8 else ''}.")
    return " ".join(parts)


def _lane(task: str, stays: list[Stay], x: Scale, top: float) -> Markup:
    colours = {place: at % len(palette.LIGHT) for at, place in enumerate(dict.fromkeys(stay.place for stay in stays))}
    parts = [element("text", task, class_="soft", x=float(LEFT), y=top + 12)]
    for stay in stays:
        left, wide = x(stay.begin), max(x(stay.end) - x(stay.begin), 0.8)
        steps = (
            f"step {count(stay.begin)}" if stay.end == stay.begin + 1 else f"steps {count(stay.begin)} to {count(stay.end - 1)}"
        )
        tip = element("title", f"{task}: {stay.place}, {steps} ({stay.reason})")
        shape = {"x": left, "y": top + 18, "width": wide, "height": float(BAR), "opacity": "0.55"}
        parts.append(element("rect", tip, class_=f"c{colours[stay.place]}", **shape))
        if wide > max(LABEL_FROM, 7.5 * len(stay.place)):
            parts.append(element("text", stay.place, x=left + 5, y=top + 32))
    return group(parts)


def _axis(x: Scale, base: float) -> Markup:
    ticks = [tick for tick in linear_ticks(x.low, x.high, 8) if tick == int(tick)]
    parts: list[Markup] = [element("line", class_="rule", x1=x.start, x2=x.stop, y1=base, y2=base)]
    for value, label in zip(ticks, tick_labels(ticks, False), strict=True):
        parts.append(element("text", label, class_="soft", x=x(value), y=base + 16, text_anchor="middle"))
    parts.append(element("text", "step", class_="soft", x=x.stop, y=base + 30, text_anchor="end"))
    return group(parts, aria_hidden="true")


def _last_step(run: Run) -> int:
    steps = [number(row.get("step")) for row in (*run.rows, *run.events)]
    return int(max((step for step in steps if math.isfinite(step)), default=0))
