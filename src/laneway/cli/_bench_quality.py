"""Benchmarks of training: which residual learns better, and which stays alive."""

from __future__ import annotations

from typing import Annotated

import tyro

from laneway.cli._bench_job import Job, job_of

Flag = tyro.conf.FlagCreatePairsOff


def quality_job(
    quick: Annotated[bool, Flag] = False,
    json: Annotated[bool, Flag] = False,
    save: str | None = None,
    variants: tuple[str, ...] = ("residual", "hc", "mhc"),
    seeds: int = 3,
    steps: int = 300,
    lr: float = 3e-3,
    threads: int = 0,
    equal_time: Annotated[bool, Flag] = False,
    long_context: Annotated[bool, Flag] = False,
    read_to: int = 4096,
) -> Job:
    """The same training run with different residuals: validation loss, step time, memory, gain.

    Args:
        quick: at most 60 s on 2 cores: a very small network, at most 40 steps, one thread.
        json: one JSON object on stdout.
        save: append the rows to DIR/quality.csv; without DIR to benchmarks/results of the source checkout.
        variants: names; residual must be among them. Any residual of the model, and mhc-uncapped.
        seeds: seeds 0 … N−1.
        steps: optimizer steps of each run.
        lr: highest learning rate, the same for all.
        threads: number of threads; 0 is all.
        equal_time: also train the plain residual for as many steps as take the time of each variant (quality_time.csv).
        long_context: train on 512 tokens, read longer sequences, and show the loss by position instead (quality_context.csv).
        read_to: longest position that is read with long_context.
    """
    if long_context:
        from laneway.bench import long_context as bench

        given = {"variants": variants, "seeds": seeds, "steps": steps, "lr": lr, "threads": threads}
        return job_of(bench, bench.LongContextOptions(read_to=read_to, **given), quick, json, save)
    from laneway.bench import quality

    given = {"variants": variants, "seeds": seeds, "steps": steps, "lr": lr, "threads": threads}
    options = quality.QualityOptions(equal_time=equal_time, **given)
    return job_of(quality, options, quick, json, save)


def stability_job(
    quick: Annotated[bool, Flag] = False,
    json: Annotated[bool, Flag] = False,
    save: str | None = None,
    variants: tuple[str, ...] = (),
    conditions: tuple[str, ...] = (),
    seeds: int = 20,
    runs: str = "",
) -> Job:
    """Which residual and which mechanism keeps a run alive: rates of divergence, composite gain, recovery after faults.

    Args:
        quick: at most 5 minutes on one core: 4 seeds, the residuals, and the conditions that separate them.
        json: one JSON object on stdout.
        save: append the cells to DIR/stability.csv; without DIR to benchmarks/results of the source checkout.
        variants: names; empty for all: residual, hc, mhc, mhc-lite, and mhc with each mechanism and its control.
        conditions: names; empty for all with residuals, and with mechanisms those in which something goes wrong.
        seeds: seeds 0 … N−1, which train together.
        runs: CSV file to append every run to as its cell ends; the same command goes on where it was stopped.
    """
    from laneway.bench import stability

    given = {"variants": variants or stability.StabilityOptions.variants, "conditions": conditions, "seeds": seeds, "runs": runs}
    options = stability.StabilityOptions(**given)
    return job_of(stability, options, quick, json, save)
