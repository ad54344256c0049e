"""The verb ``laneway bench adaptation``."""

from __future__ import annotations

from typing import Annotated

import tyro

from laneway.cli._bench_job import Job, job_of

Flag = tyro.conf.FlagCreatePairsOff


def adaptation_job(
    quick: Annotated[bool, Flag] = False,
    json: Annotated[bool, Flag] = False,
    save: str | None = None,
    links: tuple[str, ...] = ("rack1", "r0h1"),
    variants: tuple[str, ...] = ("fixed", "adapt", "adapt_drop"),
    slower: float = 8.0,
    steps: tuple[int, int, int] = (20, 30, 60),
    size_kb: int = 1024,
    host_mbit: float = 600.0,
    rack_mbit: float = 150.0,
    jitter: float = 0.2,
) -> Job:
    """A link gets slow in the middle of a run, and well again, on a network of several hosts on this machine: what is done.

    Args:
        quick: at most 60 s on 2 cores: one link, few steps.
        json: one JSON object on stdout.
        save: append the rows to DIR/adaptation.csv; without DIR to benchmarks/results of the source checkout.
        links: rack0, rack1, r0h0, r0h1, r1h0, r1h1.
        variants: fixed (nothing is done), adapt, adapt_drop (the outermost level may drop).
        slower: how many times slower the link gets.
        steps: before, while it is slow, and after at most.
        size_kb: of the vector, kB of 1024 bytes.
        host_mbit: rate of a host's link, each way.
        rack_mbit: rate of a rack's uplink, each way.
        jitter: a course more in which the link's rate is drawn anew in every step, from its rate ± this share; 0: none.
    """
    from laneway.bench import adaptation

    options = adaptation.AdaptationOptions(links, slower, variants, steps, size_kb, host_mbit, rack_mbit, jitter)
    return job_of(adaptation, options, quick, json, save)
