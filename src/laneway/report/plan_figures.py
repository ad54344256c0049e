"""The plan section of the report: the picture of each run's plan and why it is as it is."""

from __future__ import annotations

from collections.abc import Iterator

from laneway.report.figures import Figure
from laneway.report.memory_figures import Table
from laneway.report.plan_picture import draw
from laneway.report.runs import Run
from laneway.report.tables import printable


def figures(runs: list[Run]) -> Iterator[Figure]:
    """Levels, groups and bytes of each run's plan."""
    for index, run in enumerate(runs):
        if run.plan is not None:
            note = f"{run.name}: {run.plan.title}" if len(runs) > 1 else run.plan.title
            yield Figure(
                "Levels, and what crosses them", "", [draw(run.plan, f"plan-{index}")], printable(f"{note}; as predicted")
            )


def tables(runs: list[Run]) -> list[Table]:
    """Each choice of a plan with its number and source."""
    headings, kinds = ["Choice", "Value", "Number", "Source"], ["", "", "detail", "detail"]
    planned = [(run.name, run.plan) for run in runs if run.plan is not None and run.plan.reasons]
    return [
        Table(
            "Why" if len(runs) == 1 else f"Why: {name}",
            headings,
            [[printable(text) for text in row] for row in plan.reasons],
            kinds,
        )
        for name, plan in planned
    ]
