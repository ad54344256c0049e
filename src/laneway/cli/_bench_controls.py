"""The verb ``laneway bench controls``."""

from __future__ import annotations

from typing import Annotated

import tyro

from laneway.cli._bench_job import Job, job_of
from laneway.core import InputError

Flag = tyro.conf.FlagCreatePairsOff


def controls_job(
    quick: Annotated[bool, Flag] = False,
    json: Annotated[bool, Flag] = False,
    save: str | None = None,
    controls: tuple[str, ...] = (),
    sizes: tuple[str, ...] = (),
    seconds: float = 40.0,
    threads: int = 1,
    ranks: int = 4,
    settings: tuple[str, ...] = (),
    parallel: str = "ddp",
    cycles: int = 6,
) -> Job:
    """What the controls of streams and gradients cost: beside the hyper-connections alone, and in a step over several ranks.

    Args:
        quick: at most a minute on one core: one small size, two ranks of a small model.
        json: one JSON object on stdout.
        save: append the rows to DIR/control_*.csv; without DIR to benchmarks/results of the source checkout.
        controls: those that act on the maps; empty for all that have a cost of their own.
        sizes: TOKENSxDIM, one or more; by default 512x128 2048x256 4096x512.
        seconds: time budget of the rounds of one size.
        threads: number of threads in one process; 0 is all.
        ranks: processes of the second table; 0 leaves it out.
        settings: what is on over ranks; empty for all.
        parallel: ddp or fsdp, over ranks.
        cycles: of 24 steps for each setting.
    """
    from laneway.bench import controls as bench
    from laneway.bench.control_cost import ControlCostOptions
    from laneway.bench.control_ranks import ControlRanksOptions

    cost = ControlCostOptions(controls or ControlCostOptions.controls, seconds=seconds, threads=threads)
    over = None
    if ranks:
        over = ControlRanksOptions(settings or ControlRanksOptions.settings, parallel, ranks, cycles=cycles)
    options = bench.ControlsOptions(cost, tuple(map(_size, sizes)) or bench.SIZES, over)
    return job_of(bench, options, quick, json, save)


def _size(text: str) -> tuple[int, int]:
    tokens, _, dim = text.partition("x")
    if not (tokens.isdigit() and dim.isdigit()):
        raise InputError("sizes", text, "TOKENSxDIM, such as 2048x256")
    return int(tokens), int(dim)
