"""The benchmark of doctor's rules."""

from __future__ import annotations

from typing import Annotated

import tyro

from laneway.cli._bench_job import Job, job_of
from laneway.core import choice

Flag = tyro.conf.FlagCreatePairsOff


def symptoms_job(
    quick: Annotated[bool, Flag] = False,
    json: Annotated[bool, Flag] = False,
    save: str | None = None,
    recipes: tuple[str, ...] = (),
    seeds: int = 3,
    turns: int = 4,
) -> Job:
    """Runs that go wrong on purpose: what doctor finds, and whether the knob that it names cures them.

    Args:
        quick: at most 60 s on 2 cores: one seed.
        json: one JSON object on stdout.
        save: append the rows to DIR/symptoms.csv; without DIR to benchmarks/results of the source checkout.
        recipes: names; empty for all: unstable-start, slow-convergence, memory-overflow.
        seeds: seeds 0 … N−1.
        turns: how often doctor's first knob is turned at most.
    """
    from laneway.bench import symptoms
    from laneway.recipes import CURES, LIMITS, RECIPES

    chosen = [choice("recipes", name, CURES) for name in recipes or CURES]
    options = symptoms.SymptomOptions({name: RECIPES[name]() for name in chosen}, LIMITS, seeds, turns)
    return job_of(symptoms, options, quick, json, save)
