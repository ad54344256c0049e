"""The verb ``laneway bench scheduling``."""

from __future__ import annotations

from typing import Annotated

import tyro

from laneway.cli._bench_job import Job, job_of

Flag = tyro.conf.FlagCreatePairsOff


def scheduling_job(
    quick: Annotated[bool, Flag] = False,
    json: Annotated[bool, Flag] = False,
    save: str | None = None,
    experiment: tuple[str, ...] = (),
    phases: int = 8,
    steps: int = 16,
) -> Job:
    """Where tasks run, decided before each step, against each choice that never changes, under a load that moves.

    Args:
        quick: at most 60 s on 2 cores: four phases of ten steps.
        json: one JSON object on stdout.
        save: append the rows to DIR/scheduling.csv; without DIR to benchmarks/results of the source checkout.
        experiment: preparing, reducing, computing; all by default.
        phases: how often the load changes.
        steps: in each phase.
    """
    from laneway.bench import scheduling

    options = scheduling.SchedulingOptions(experiment or scheduling.EXPERIMENTS, phases, steps)
    return job_of(scheduling, options, quick, json, save)
