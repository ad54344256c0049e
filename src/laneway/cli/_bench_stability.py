"""The benchmark of stability."""

from __future__ import annotations

from typing import Annotated

import tyro

from laneway.cli._bench_job import Job, job_of

Flag = tyro.conf.FlagCreatePairsOff


def stability_job(
    quick: Annotated[bool, Flag] = False,
    json: Annotated[bool, Flag] = False,
    save: str | None = None,
    variants: str = "",
    conditions: str = "",
    seeds: int = 20,
    runs: str = "",
) -> Job:
    """Which residual and which mechanism keeps a run alive: rates of divergence, composite gain, recovery after faults.

    Args:
        quick: at most 5 minutes on one core: 4 seeds, and the conditions that separate the residuals.
        json: one JSON object on stdout.
        save: append the cells to DIR/stability.csv; without DIR to benchmarks/results of the source checkout.
        variants: comma-separated; empty for all: residual, hc, mhc, mhc-lite, and mhc with each mechanism and its control.
        conditions: comma-separated; empty for all.
        seeds: seeds 0 … N−1, which train together.
        runs: CSV file to append every run to as its cell ends; the same command goes on where it was stopped.
    """
    from laneway.bench import stability

    options = stability.StabilityOptions(seeds=seeds, runs=runs)
    options = stability.chosen(options, variants, conditions)
    return job_of(stability, options, quick, json, save)
