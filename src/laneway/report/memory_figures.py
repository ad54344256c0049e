"""The pictures and tables of a run's memory: occupancy and plan of a pass, and what each pass came to."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from laneway.report import lives
from laneway.report.chart import Chart, Line, Mark, draw
from laneway.report.figures import MARKS_PER_RUN, Figure, Key
from laneway.report.memory import CHOICES, Memory, Plan
from laneway.report.numbers import MISSING, binary_unit, count, figure, size
from laneway.report.runs import Run
from laneway.report.series import Curve
from laneway.report.tables import printable
from laneway.rundir import number

SHAPES = ((560, 310, "for-wide"), (360, 250, "for-narrow"))
BUDGET_SHOWN = 3.0  # a budget that is so many times what is used would flatten the curves: it is named instead
BLOCKS_SHOWN = 3
PLANNED, KEPT, BUDGET = 0, 6, 1


@dataclass(frozen=True)
class Table:
    """A small table under a heading; ``kinds``: of the columns, ``num``, ``detail`` or nothing."""

    title: str
    headings: list[str]
    rows: list[list[str]]
    kinds: list[str]
    css: str = ""


def plan_figures(runs: list[Run]) -> Iterator[Figure]:
    """Occupancy and plan of each run's last plan."""
    for index, run in enumerate(runs):
        if run.memory is not None and run.memory.plans:
            plan, name = run.memory.plans[-1], f"{run.name}, " if len(runs) > 1 else ""
            note = printable(f"{name}pass of {plan.shape}")
            yield from _occupancy(plan, note, f"memory-occupancy-{index}")
            yield from _lives(plan, note, f"memory-plan-{index}")


def _occupancy(plan: Plan, note: str, identifier: str) -> Iterator[Figure]:
    factor, unit = lives.time_unit(np.concatenate([plan.times, plan.unmanaged_times]))
    values = np.concatenate([plan.trace, plan.unmanaged_trace])
    if not len(values):
        return
    highest = float(values.max())
    shown = 0 < plan.budget <= BUDGET_SHOWN * highest
    divisor, size_unit = binary_unit(max(highest, plan.budget if shown else 0.0))
    ends = factor * np.array([0.0, max(float(times[-1]) for times in (plan.times, plan.unmanaged_times) if len(times))])
    lines = [
        Line(_stairs(plan.unmanaged_times * factor, plan.unmanaged_trace / divisor), "everything kept", KEPT, "2 3"),
        Line(_stairs(plan.times * factor, plan.trace / divisor), "as planned", PLANNED),
    ]
    if shown:
        lines.insert(0, Line(Curve(ends, np.full(2, plan.budget / divisor)), "budget", BUDGET, "7 3"))
    elif math.isfinite(plan.budget):
        note += f"; budget {size(plan.budget)}, beyond the picture"
    chart = Chart("Occupancy over a pass", size_unit, lines, f"{unit} into the pass", log=False, low=0.0, fine_x=True)
    drawings = [draw(chart, f"{identifier}-{css}", width, height, css) for width, height, css in SHAPES]
    yield Figure(chart.title, size_unit, drawings, note, [line for line in lines if line.curve.drawable])


def _stairs(times: np.ndarray, values: np.ndarray) -> Curve:
    """Each value until the next."""
    return Curve(np.repeat(times, 2)[1:], np.repeat(values, 2)[:-1])


def _lives(plan: Plan, note: str, identifier: str) -> Iterator[Figure]:
    if not plan.lives:
        return
    title = "The plan, tensor by tensor"
    drawings = [lives.draw(title, plan, f"{identifier}-{css}", width, height, css) for width, height, css in SHAPES]
    note += "; thickness by size"
    if len(plan.lives) > lives.BAR_LIMIT:
        note += f"; small ones of {count(len(plan.lives))} are merged"
    there = {life.choice for life in plan.lives}
    keys = [Key(choice, lives.COLOURS[choice], "bar") for choice in CHOICES if choice in there]
    if "move" in there:
        keys.append(Key("moved: away between save and first use, or on its way", lives.COLOURS["move"], "bar away"))
    if "recompute" in there:
        keys.append(Key("not there until computed again", lives.COLOURS["recompute"], "line", "2 2"))
    yield Figure(title, "", drawings, note, keys)


def pass_figures(runs: list[Run]) -> Iterator[Figure]:
    """Peak, stalls and traffic of each run's passes."""
    for index, run in enumerate(runs):
        if run.memory is not None and run.memory.passes:
            note = run.name if len(runs) > 1 else ""
            for made in (_peaks(run.memory), _seconds(run.memory), _traffic(run.memory)):
                yield from _pass_figure(made, run.memory, note, f"memory-pass-{index}")


def _peaks(memory: Memory) -> Chart:
    observed, predicted = memory.curve("peak"), memory.curve("predicted")
    highest = max([float(np.nanmax(c.y)) for c in (observed, predicted) if c.drawable], default=1.0)
    shown = 0 < memory.budget <= BUDGET_SHOWN * highest
    divisor, unit = binary_unit(max(highest, memory.budget if shown else 0.0))
    lines = [
        Line(Curve(observed.x, observed.y / divisor), "observed", PLANNED),
        Line(Curve(predicted.x, predicted.y / divisor), "predicted", KEPT, "2 3"),
    ]
    if shown and len(observed):
        ends = observed.x[[0, -1]]
        lines.insert(0, Line(Curve(ends, np.full(2, memory.budget / divisor)), "budget", BUDGET, "7 3"))
    return Chart("Peak of each pass", unit, lines, "pass", log=False, low=0.0)


def _seconds(memory: Memory) -> Chart:
    lines = [
        Line(memory.curve("stall"), "waiting for transfers", 0),
        Line(memory.curve("recompute"), "computing again", 1, "7 3"),
    ]
    return Chart("Stalls and recomputation", "s", lines, "pass", log=False, low=0.0)


def _traffic(memory: Memory) -> Chart:
    out, back = memory.curve("bytes_out"), memory.curve("bytes_in")
    divisor, unit = binary_unit(max([float(np.nanmax(c.y)) for c in (out, back) if c.drawable], default=1.0))
    lines = [
        Line(Curve(out.x, out.y / divisor), "out to the tier", 0),
        Line(Curve(back.x, back.y / divisor), "back to the device", 2, "7 3"),
    ]
    return Chart("Bytes moved", unit, lines, "pass", log=False, low=0.0)


def _pass_figure(chart: Chart, memory: Memory, note: str, identifier: str) -> Iterator[Figure]:
    if not chart.drawable:
        return
    strayed = memory.ways("strayed")
    step = max(1, math.ceil(len(strayed) / MARKS_PER_RUN))
    chart.marks.extend(Mark(at, f"pass {at:g} strayed from its plan", "strayed", BUDGET) for at in strayed[::step])
    notes = [note, "▼ strayed from its plan"] if strayed else [note]
    name = f"{identifier}-{chart.title.split()[0].lower()}"
    keys = [line for line in chart.lines if line.curve.drawable]
    yield Figure(chart.title, chart.unit, [draw(chart, name)], "; ".join(filter(None, notes)), keys)


def tables(runs: list[Run]) -> list[Table]:
    """Budget and tier of each run, and its plans."""
    managed = [(run.name, run.memory) for run in runs if run.memory is not None]
    if not managed:
        return []
    return [_manager_table(managed), *([_plan_table(managed)] if any(memory.plans for _, memory in managed) else [])]


def _manager_table(managed: list[tuple[str, Memory]]) -> Table:
    columns = [_manager_facts(memory) for _, memory in managed]
    rows = [[label, *(column[label] for column in columns)] for label in columns[0]]
    headings = [name for name, _ in managed] if len(managed) > 1 else ["Value"]
    return Table("Budget and tier", ["", *map(printable, headings)], rows, [""] * (1 + len(managed)), "config")


def _manager_facts(memory: Memory) -> dict[str, str]:
    tier = {key: number(value) for key, value in memory.tier.items()}
    ways = {way: len(memory.ways(way)) for way in ("recorded", "planned", "strayed")}
    return {
        "Budget": size(memory.budget),
        "Capacity of the device": size(memory.capacity),
        "Policy without a plan": printable(memory.policy),
        "Tier": printable(str(memory.tier.get("name", MISSING))),
        "Most in the tier": f"{size(tier.get('peak', math.nan))} of {size(tier.get('capacity', math.nan))}",
        "Bandwidth to the tier": _rate(tier.get("write_bandwidth", math.nan)),
        "Bandwidth from the tier": _rate(tier.get("read_bandwidth", math.nan)),
        "Passes": ", ".join(f"{count(float(n))} {way}" for way, n in ways.items() if n) or "none",
        "Plans made anew": count(memory.replanned),
    }


def _rate(bytes_per_second: float) -> str:
    return size(bytes_per_second) + ("/s" if math.isfinite(bytes_per_second) else "")


def _plan_table(managed: list[tuple[str, Memory]]) -> Table:
    several = len(managed) > 1
    headings = ["Shape", "Fits", "Budget", "Planned", "All kept", "Longer by", "β", "Keep", "Move", "Recompute"]
    headings += ["Checkpointed", "Why"]
    rows = [[*([printable(name)] if several else []), *_plan_row(plan)] for name, memory in managed for plan in memory.plans]
    kinds = ["", "", *["num"] * 8, "", "detail"]
    return Table("Plans and their peaks", [*(["Run"] if several else []), *headings], rows, [*([""] if several else []), *kinds])


def _plan_row(plan: Plan) -> list[str]:
    longer = f"{100 * plan.overhead:.1f}\u202f%".replace("-", "−") if math.isfinite(plan.overhead) else MISSING
    choices = [f"{count(number)} · {size(nbytes)}" for number, nbytes in plan.counts.values()]
    sizes = [size(value) for value in (plan.budget, plan.predicted_peak, plan.unmanaged_peak)]
    fits = "yes" if plan.feasible else "no"
    return [
        printable(plan.shape),
        fits,
        *sizes,
        longer,
        figure(plan.beta, 3),
        *choices,
        _blocks(plan.blocks),
        printable(plan.reason),
    ]


def _blocks(names: list[str]) -> str:
    more = f" and {len(names) - BLOCKS_SHOWN} more" if len(names) > BLOCKS_SHOWN else ""
    return printable(", ".join(names[:BLOCKS_SHOWN]) + more) or "none"
