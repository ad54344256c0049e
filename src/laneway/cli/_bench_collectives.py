"""The benchmark of reductions on a network of several hosts."""

from __future__ import annotations

from typing import Annotated

import tyro

from laneway.cli._bench_job import Job, job_of
from laneway.core import choice

Flag = tyro.conf.FlagCreatePairsOff


def collectives_job(
    quick: Annotated[bool, Flag] = False,
    json: Annotated[bool, Flag] = False,
    save: str | None = None,
    ops: tuple[str, ...] = ("all_reduce", "reduce_scatter", "all_gather", "ddp_step"),
    sizes_kb: tuple[int, ...] = (64, 256, 1024, 4096, 16384, 65536),
    variants: tuple[str, ...] = (),
    racks: int = 2,
    hosts: int = 2,
    ranks: int = 2,
    host_mbit: float = 600.0,
    rack_mbit: float = 150.0,
    piece_kb: int = 2048,
    seconds: float = 60.0,
) -> Job:
    """Reductions over the levels of a network of several hosts on this machine, against flat ones: times, and bytes on each link.

    Args:
        quick: at most 60 s on 2 cores: small sizes, few rounds.
        json: one JSON object on stdout.
        save: append the rows to DIR/collectives*.csv; without DIR to benchmarks/results of the source checkout.
        ops: all_reduce, reduce_scatter, all_gather; ddp_step: forward and backward of a model under DDP.
        sizes_kb: of the whole vector, kB of 1024 bytes.
        variants: names; empty for all. flat must be among them.
        racks: of the network; racks hang on one core.
        hosts: of a rack.
        ranks: of a host.
        host_mbit: rate of a host's link, each way.
        rack_mbit: rate of a rack's uplink, each way.
        piece_kb: pieces of a large vector that follow each other through the levels.
        seconds: time budget of the rounds of one operation and size.
    """
    from laneway.bench import collectives

    network = {"racks": racks, "hosts": hosts, "ranks": ranks, "host_mbit": host_mbit, "rack_mbit": rack_mbit}
    options = collectives.CollectivesOptions(
        ops, sizes_kb, variants or collectives.ALL, **network, seconds=seconds, piece_kb=piece_kb
    )
    return job_of(collectives, options, quick, json, save)


def prediction_job(
    quick: Annotated[bool, Flag] = False,
    json: Annotated[bool, Flag] = False,
    save: str | None = None,
    sizes_kb: tuple[int, ...] = (1024, 4096, 16384, 65536),
    rounds: int = 7,
    probe_rounds: int = 7,
    host_mbit: float = 600.0,
    rack_mbit: float = 150.0,
    order: str = "packed",
) -> Job:
    """How well a measurement with small messages foretells the time of every reduction, and picks the fastest.

    Args:
        quick: at most 60 s on 2 cores: two sizes, two rounds.
        json: one JSON object on stdout.
        save: append the rows to DIR/prediction*.csv; without DIR to benchmarks/results of the source checkout.
        sizes_kb: of the whole vector, kB of 1024 bytes.
        rounds: timed calls of each scheme and size.
        probe_rounds: of the measurement.
        host_mbit: rate of a host's link, each way.
        rack_mbit: rate of a rack's uplink, each way.
        order: packed or spread: how ranks lie over the racks.
    """
    from laneway.bench import prediction

    choice("order", order, ("packed", "spread"))
    options = prediction.PredictionOptions(sizes_kb, rounds, probe_rounds, host_mbit, rack_mbit, order)
    return job_of(prediction, options, quick, json, save)
