"""The network as a run found it: how much slower than in good times each level was, and what was changed for it.

Read from events of the kind ``network``: ``level``, ``link``, ``state`` and ``was`` (up, degraded or down), ``ratio``, and the
schemes of reduction ``from`` and ``to``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from laneway.report.chart import Chart, Line, draw
from laneway.report.figures import Figure, Key
from laneway.report.memory_figures import Table
from laneway.report.numbers import count, figure
from laneway.report.palette import run_style
from laneway.report.runs import Run
from laneway.report.series import Curve
from laneway.report.tables import EVENT_LIMIT, printable
from laneway.rundir import number

TITLE, UNIT = "Slow levels of the network", "× the usual time"
HEADINGS = ["Step", "Level", "Link", "State", "Slower", "Gradients then go"]
LARGEST = 1e6  # what is down may take for ever


def figures(runs: list[Run]) -> Iterator[Figure]:
    """One chart: a curve for each level that was ever slow; nothing where none was."""
    lines = []
    for run in runs:
        for level, curve in levels(run).items():
            label = printable(f"{run.name}: {level}" if len(runs) > 1 else level)
            lines.append(Line(curve, label, *run_style(len(lines))))
    chart = Chart(TITLE, UNIT, lines, low=1.0, reference=1.0, least_span=1.0)
    if chart.drawable:
        keys: list[Line | Key] = list(lines)
        yield Figure(TITLE, UNIT, [draw(chart, "network-levels")], "as collectives and the probe tell", keys)


def levels(run: Run) -> dict[str, Curve]:
    """Ratio of each level over steps, from the first event to the last step; it stays until the next event says otherwise."""
    steps = [step for row in run.rows if math.isfinite(step := number(row.get("step")))]
    found: dict[str, tuple[list[float], list[float]]] = {}
    for step, event in _events(run):
        x, y = found.setdefault(str(event.get("level")), ([min([step, *steps])], [1.0]))
        ratio = 1.0 if event.get("state") == "up" else number(event.get("ratio"))
        x += [step, step]
        y += [y[-1], min(max(ratio, 1.0), LARGEST) if math.isfinite(ratio) else LARGEST]
    return {level: Curve(np.array([*x, max([x[-1], *steps])]), np.array([*y, y[-1]])) for level, (x, y) in found.items()}


def tables(runs: list[Run]) -> list[Table]:
    """Each run's changes, the last ``EVENT_LIMIT`` of them."""
    found = []
    for run in runs:
        rows = [_row(step, event) for step, event in _events(run)][-EVENT_LIMIT:]
        if rows:
            title = "Changes of the network" + (f": {run.name}" if len(runs) > 1 else "")
            found.append(Table(printable(title), HEADINGS, rows, ["", "", "detail", "", "num", "detail"]))
    return found


def _row(step: float, event: dict[str, Any]) -> list[str]:
    before, after, was, state = (str(event.get(name, "?")) for name in ("from", "to", "was", "state"))
    told = after if before != after else f"as before: {after}"
    changed = f"{was} → {state}" if was != state else state
    ratio = number(event.get("ratio"))
    slower = f"{figure(ratio, 3)} ×" if math.isfinite(ratio) else "no answer"
    texts = [count(step), str(event.get("level")), str(event.get("link")), changed, slower, told]
    return [printable(text) for text in texts]


def _events(run: Run) -> list[tuple[float, dict[str, Any]]]:
    """Events of the network with their steps."""
    found = [event for event in run.events if event.get("kind") == "network"]
    return [(step, event) for event in found if math.isfinite(step := number(event.get("step")))]
