"""The benchmark of training under faults."""

from __future__ import annotations

from typing import Annotated

import tyro

from laneway.cli._bench_job import Job, job_of

Flag = tyro.conf.FlagCreatePairsOff


def soak_job(
    quick: Annotated[bool, Flag] = False,
    json: Annotated[bool, Flag] = False,
    save: str | None = None,
    faults: tuple[str, ...] = ("spike", "nan", "kill", "disk", "corrupt"),
    variants: tuple[str, ...] = ("unmanaged", "protected", "managed"),
    seeds: int = 3,
    steps: int = 30,
    checkpoint_every: int = 6,
    each: int = 1,
) -> Job:
    """Training of varying length under a memory limit with faults: interruptions and work lost, managed and unmanaged.

    Args:
        quick: at most 60 s on 2 cores: one schedule with one fault of each kind, all together, in fewer steps.
        json: one JSON object on stdout.
        save: append the rows to DIR/soak.csv and soak_summary.csv; without DIR to benchmarks/results of the source checkout.
        faults: kinds, each alone and all together: spike, nan, kill, disk, corrupt.
        variants: unmanaged (must be there), protected (no memory manager), managed.
        seeds: schedules, from seeds 0 … N−1.
        steps: optimizer steps of each run.
        checkpoint_every: steps between checkpoints.
        each: faults of each kind in a run.
    """
    from laneway.bench import soak
    from laneway.bench.soak_schedule import Workload

    work = Workload(steps=steps, checkpoint_every=checkpoint_every)
    options = soak.SoakOptions(faults, variants, seeds=seeds, each=each, workload=work)
    return job_of(soak, options, quick, json, save)
