"""Benchmarks that time nothing: recorded steps in a simulated device, and the cost model."""

from __future__ import annotations

from typing import Annotated

import tyro

from laneway.cli._bench_job import Job, job_of

Flag = tyro.conf.FlagCreatePairsOff


def policies_job(
    quick: Annotated[bool, Flag] = False,
    json: Annotated[bool, Flag] = False,
    save: str | None = None,
    traces: str = "",
    record: Annotated[bool, Flag] = False,
) -> Job:
    """Eviction policies on recorded training steps in a simulated device, and whether they reach their targets.

    Args:
        quick: at most 60 s on 2 cores: one link and one budget.
        json: one JSON object on stdout.
        save: append the rows to DIR/policies.csv; without DIR to benchmarks/results of the source checkout.
        traces: folder of the traces; benchmarks/traces of the source checkout by default.
        record: record the traces first, into that folder; takes minutes, one thread.
    """
    from laneway.bench import policies

    return job_of(policies, policies.PolicyOptions(traces=traces, record=record), quick, json, save)


def planner_job(
    quick: Annotated[bool, Flag] = False,
    json: Annotated[bool, Flag] = False,
    save: str | None = None,
    rows: str = "",
    calibration: str = "",
) -> Job:
    """The cost model against published step times, and what it says of the claims; nothing is timed.

    Args:
        quick: at most 60 s on 2 cores: no constants fitted anew, fewer message sizes.
        json: one JSON object on stdout; its summary has mape, spearman and regret by model size, as shares.
        save: append the rows to DIR/planner*.csv; without DIR to benchmarks/results of the source checkout.
        rows: evaluate this CSV file with the published columns (times in ms), and nothing else.
        calibration: TOML or JSON file with measured constants instead of the defaults.
    """
    from laneway.bench import planner

    return job_of(planner, planner.PlannerOptions(rows=rows, calibration=calibration), quick, json, save)
