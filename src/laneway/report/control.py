"""What acted on the streams and gradients of a run: curvature, gates, priorities and purified paths over depth and time.

Read from metrics rows (``curvature``, ``gate`` and ``priority``: a list a site of one number a stream; ``lambda``;
``purified_paths``) and from events of the kind ``purify`` (``path``, ``score``, ``correction``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from laneway.report import heatmap
from laneway.report.figures import Figure, Quantity, scalar_figures
from laneway.report.heatmap import Heat, HeatChart, colour_scale
from laneway.report.runs import Run
from laneway.rundir import number

SCALARS = (
    Quantity("lambda", "Strength λ of the curvature constraint", low=0.0, high=1.0, log=False),
    Quantity("purified_paths", "Purified paths", "per step", low=0.0, log=False, least_span=1.0),
)
PER_STREAM = (
    Quantity("curvature", "Curvature κ", "0: flat, at most 1", low=0.0, log=False, least_span=0.01),
    Quantity("gate", "Gate on the writes", "1: open", low=0.0, high=1.0, log=False),
    Quantity("priority", "Priority", "share of what is written", low=0.0, log=False, least_span=0.01),
)
EVENTS = Quantity("purify", "Purified paths by block", "times", low=0.0, log=False, least_span=1.0)
COLUMNS, SHOWN = 60, 5
_BLOCK = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


def figures(runs: list[Run]) -> Iterator[Figure]:
    """All pictures; none for runs without control."""
    yield from scalar_figures(runs, SCALARS)
    for quantity in PER_STREAM:
        yield from _stream_figures(quantity, [(run, stream_heats(run.rows, quantity.key)) for run in runs])
    yield from _event_figures([(run, purified(run.events, [number(row.get("step")) for row in run.rows])) for run in runs])


def stream_heats(rows: Iterable[dict[str, Any]], key: str) -> list[Heat]:
    """Values [rows, sites] of each stream, from lists [sites][streams]; sites with fewer streams have NaN there.

    A row of another number of sites than the last one has is left out; what is no finite number is NaN.
    """
    found = [(row["step"], sites) for row in rows if (sites := _sites(row.get(key)))]
    found = [(step, sites) for step, sites in found if len(sites) == len(found[-1][1])]
    streams = max((len(site) for _, sites in found for site in sites), default=0)
    steps = [step for step, _ in found]
    heats = []
    for stream in range(streams):
        values = [[site[stream] if stream < len(site) else np.nan for site in sites] for _, sites in found]
        heats.append(Heat.of((steps, values)))
    return heats


def _sites(value: Any) -> list[list[float]]:
    """Lists of numbers, one a site; empty where ``value`` is something else."""
    if not isinstance(value, list) or not all(isinstance(site, list) for site in value):
        return []
    return [[number(item) for item in site] for site in value]


def purified(events: Iterable[dict[str, Any]], steps_of_run: Iterable[float] = ()) -> tuple[Heat | None, str]:
    """How often paths of each block were told of, over the run's steps, and a line about the paths that were most often."""
    hits = [event for event in events if event.get("kind") == "purify" and np.isfinite(number(event.get("step")))]
    counts: dict[str, int] = {}
    for event in hits:
        counts[str(event.get("path"))] = counts.get(str(event.get("path")), 0) + 1
    note = "; ".join(f"{path} {count} ×" for path, count in sorted(counts.items(), key=lambda item: -item[1])[:SHOWN])
    note += f" and {len(counts) - SHOWN} more" if len(counts) > SHOWN else ""
    placed = [(int(found[1]), number(event["step"])) for event in hits if (found := _BLOCK.search(str(event.get("path"))))]
    if not placed:
        return None, note
    blocks, steps = np.array([block for block, _ in placed]), np.array([step for _, step in placed])
    over = np.array([*steps, *(step for step in steps_of_run if np.isfinite(step))])
    edges = np.unique(np.linspace(over.min(), over.max() + 1, COLUMNS + 1).round())
    depth = min(int(blocks.max()), 1000) + 1
    values, _, _ = np.histogram2d(steps, blocks, bins=(edges, np.arange(depth + 1)))
    return Heat(edges[:-1], values), note


def _stream_figures(quantity: Quantity, found: list[tuple[Run, list[Heat]]]) -> Iterator[Figure]:
    """One figure a run with one heat map a stream; all on one colour scale."""
    drawable = [(run, [heat for heat in heats if heat.drawable]) for run, heats in found]
    pool = [heat for _, heats in drawable for heat in heats]
    if not pool:
        return
    color = colour_scale(pool, quantity.log, quantity.low, quantity.high, quantity.least_span)
    for index, (run, heats) in enumerate(drawable):
        for stream, heat in enumerate(heats):
            name = run.name if len(found) > 1 else ""
            title = f"{quantity.title}, stream {stream}"
            chart = HeatChart(f"{title}: {name}" if name else title, heat, color)
            yield Figure(title, quantity.unit, [heatmap.draw(chart, f"control-{quantity.key}-{index}-{stream}")], name)


def _event_figures(found: list[tuple[Run, tuple[Heat | None, str]]]) -> Iterator[Figure]:
    heats = [heat for _, (heat, _) in found if heat is not None]
    if not heats:
        return
    color = colour_scale(heats, EVENTS.log, EVENTS.low, EVENTS.high, EVENTS.least_span)
    for index, (run, (heat, note)) in enumerate(found):
        if heat is not None:
            name = run.name if len(found) > 1 else ""
            quantity = replace(EVENTS, title=f"{EVENTS.title}: {name}" if name else EVENTS.title)
            drawing = heatmap.draw(HeatChart(quantity.title, heat, color, "block"), f"control-purify-{index}")
            yield Figure(EVENTS.title, EVENTS.unit, [drawing], ": ".join(filter(None, [name, note])))
