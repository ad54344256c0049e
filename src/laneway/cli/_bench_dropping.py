"""The verb ``laneway bench dropping``."""

from __future__ import annotations

from typing import Annotated

import tyro

from laneway.cli._bench_job import Job, job_of
from laneway.cli._lists import joined

Flag = tyro.conf.FlagCreatePairsOff


def dropping_job(
    quick: Annotated[bool, Flag] = False,
    json: Annotated[bool, Flag] = False,
    save: str | None = None,
    variants: tuple[str, ...] = (),
    seeds: int = 3,
    steps: int = 300,
    members: int = 4,
    lr: float = 3e-3,
) -> Job:
    """What gradients that stay at home cost: validation loss and bytes with and without error feedback, against sending all.

    Args:
        quick: about a minute on 2 cores: three variants, one seed, few steps.
        json: one JSON object on stdout.
        save: append the rows to DIR/dropping*.csv; without DIR to benchmarks/results of the source checkout.
        variants: names; empty for all.
        seeds: runs of each variant.
        steps: optimizer steps of a run.
        members: processes that exchange gradients.
        lr: highest learning rate.
    """
    from laneway.bench import dropping

    chosen = joined(variants, list(dropping.VARIANTS)) or dropping.DroppingOptions.variants
    return job_of(dropping, dropping.DroppingOptions(chosen, seeds, steps, members, lr), quick, json, save)
