"""``laneway bench collectives``: reductions over the levels of a real network of several hosts, against flat ones.

The network is a lab on this machine (`laneway.bench.netlab`): hosts are network namespaces, every link has a rate. All variants
of an operation and a size take turns; ratios are medians of the ratios within a round. Bytes are counted by the links.

    floor: for each link, the bytes that were counted over its rate; the largest. A collective can't be faster with these bytes.

Sizes are those of the whole vector (of the gathered one, for an all-gather), in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from laneway.bench.collectives_ddp import STEP_VARIANTS, judge_steps, steps
from laneway.bench.collectives_ranks import Measured
from laneway.bench.collectives_targets import judge
from laneway.bench.collectives_variants import OPS, PIECE_BYTES, VARIANTS, scheme_of
from laneway.bench.netlab import Network, available
from laneway.bench.netlab import run as run_lab
from laneway.bench.rows import Report, Row
from laneway.bench.stats import paired_ratio, parts, quartiles
from laneway.core import InputError, choices, positive_int

__all__ = ["CollectivesOptions", "quick", "run"]

SIZES_KB = (64, 256, 1024, 4096, 16384, 65536)
ALL = tuple(VARIANTS)
DDP_STEP = "ddp_step"
FLATS = ("flat", "flat_spread")
SPARE_S = 60.0
SLOWER = 4.0
"""How many times longer than the rates allow a call may take before the lab is ended."""


@dataclass(frozen=True)
class CollectivesOptions:
    """What is timed, on which network."""

    ops: tuple[str, ...] = (*OPS, DDP_STEP)
    sizes_kb: tuple[int, ...] = SIZES_KB
    """kB of 1024 bytes."""
    variants: tuple[str, ...] = ALL
    racks: int = 2
    hosts: int = 2
    """Of a rack."""
    ranks: int = 2
    """Of a host."""
    host_mbit: float = 600.0
    rack_mbit: float = 150.0
    seconds: float = 60.0
    """Budget of the rounds of one operation and size."""
    rounds: tuple[int, int] = (5, 100)
    """Least and most."""
    piece_kb: int = PIECE_BYTES >> 10
    quick: bool = False

    def check(self) -> None:
        """Raise InputError where an option is out of range, and Unavailable where this machine can't hold the network."""
        choices("ops", self.ops, (*OPS, DDP_STEP))
        choices("variants", self.variants, VARIANTS)
        if "flat" not in self.variants:
            raise InputError("variants", self.variants, "names with flat among them: the others are compared with it")
        if not self.sizes_kb:
            raise InputError("sizes_kb", "", "one or more integers ≥ 1")
        for size in self.sizes_kb:
            positive_int("sizes_kb", size)
        positive_int("piece_kb", self.piece_kb)
        if not self.seconds > 0:
            raise InputError("seconds", self.seconds, "a number above 0")
        if self.network().world > min(self.sizes_kb) * 256:
            raise InputError("sizes_kb", self.sizes_kb, "sizes of at least one number for each rank")
        available()

    def network(self) -> Network:
        """The lab's."""
        return Network.grid(self.racks, self.hosts, self.ranks, host_mbit=self.host_mbit, rack_mbit=self.rack_mbit)


def quick(options: CollectivesOptions) -> CollectivesOptions:
    """At most a minute on two cores: small sizes, few rounds."""
    return replace(options, sizes_kb=(64, 4096), seconds=2.0, rounds=(2, 3), quick=True)


def run(options: CollectivesOptions, progress: Callable[[str], None] = lambda line: None) -> Report:
    """Time every operation and size.

    Raises:
        Unavailable: this machine can't hold the network. RankFailed, LabError: a rank or the lab failed.
    """
    options.check()
    rows: list[Row] = []
    summary: dict[str, Any] = {}
    for op in (op for op in options.ops if op != DDP_STEP):
        for size in options.sizes_kb:
            found = _measured(options, op, size << 10)
            mine = [_row(options, op, size << 10, name, found) for name in found]
            rows += mine
            summary[f"{op} {_size(size)}"] = _figures(mine)
            progress(f"{op}, {_size(size)}: {len(next(iter(found.values())).seconds)} rounds of {len(found)} variants")
    tables, notes = {"collectives": rows}, judge(rows)
    if DDP_STEP in options.ops:
        tables["collectives_ddp"] = steps(
            options.network(), options.seconds, options.rounds, options.piece_kb << 10, options.quick
        )
        summary[DDP_STEP] = {
            f"{row['variant']}: exposed over plain DDP's": parts(row, "exposed_left")
            for row in tables["collectives_ddp"]
            if row["variant"] in STEP_VARIANTS
        }
        notes += judge_steps(tables["collectives_ddp"])
        progress(f"{DDP_STEP}: {tables['collectives_ddp'][0]['rounds']} rounds")
    if options.quick:
        notes.append("quick: ≤ 60 s on 2 cores; small sizes and few rounds. Leave --quick out for figures")
    return Report("collectives", tables, summary, notes)


def _measured(options: CollectivesOptions, op: str, nbytes: int) -> dict[str, Measured]:
    names = [name for name in options.variants if VARIANTS[name].fits(op, nbytes)]
    schemes = {name: scheme_of(VARIANTS[name], options.piece_kb << 10).to_dict() for name in names}
    network = options.network()
    slowest = 4 * nbytes * 8 / (min(network.rate(link) for link in network.links) * 1e6)
    limit = SPARE_S + 2 * options.seconds + SLOWER * slowest * len(names) * (options.rounds[0] + 1)
    arguments = {
        "op": op,
        "nbytes": nbytes,
        "variants": names,
        "seconds": options.seconds,
        "rounds": options.rounds,
        "schemes": schemes,
    }
    return run_lab("laneway.bench.collectives_ranks:measure", network, arguments, timeout=limit)[0]


def _row(options: CollectivesOptions, op: str, nbytes: int, name: str, found: Mapping[str, Measured]) -> Row:
    one = found[name]
    q1, median, q3 = (1000 * value for value in quartiles(one.seconds))
    row: Row = {
        "op": op,
        "message_bytes": nbytes,
        "variant": name,
        "scheme": str(scheme_of(VARIANTS[name], options.piece_kb << 10)),
        "racks": options.racks,
        "hosts": options.hosts,
        "ranks": options.ranks,
        "host_mbit": options.host_mbit,
        "rack_mbit": options.rack_mbit,
        "quick": int(options.quick),
        "rounds": len(one.seconds),
        "wall_ms": median,
        "wall_ms_q1": q1,
        "wall_ms_q3": q3,
    }
    for other in FLATS:
        if other in found:
            row |= paired_ratio(found[other].seconds, one.seconds).columns(f"{other}_over")
        else:
            row |= {f"{other}_over{end}": None for end in ("", "_low", "_high")}
    return row | _counted(options.network(), nbytes, one) | {"error": one.error, "identical": int(one.identical)}


def _counted(network: Network, nbytes: int, one: Measured) -> Row:
    """Bytes on the busiest links, and the time they need."""
    rack, host = (max(count for link, count in one.nbytes.items() if link.startswith("rack") == outer) for outer in (True, False))
    return {
        "rack_bytes": rack,
        "host_bytes": host,
        "rack_over_vector": rack / nbytes,
        "host_over_vector": host / nbytes,
        "floor_ms": 1000 * max(8 * count / (network.rate(link) * 1e6) for link, count in one.nbytes.items()),
    }


def _figures(rows: list[Row]) -> dict[str, Any]:
    """How many times faster than each flat one, where that one is another."""
    return {
        f"{other} over {row['variant']}": parts(row, f"{other}_over")
        for row in rows
        for other in FLATS
        if row["variant"] not in FLATS and row[f"{other}_over"] is not None
    }


def _size(kilobytes: int) -> str:
    return f"{kilobytes} kB" if kilobytes < 1024 else f"{kilobytes / 1024:g} MB"
