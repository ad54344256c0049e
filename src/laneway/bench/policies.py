"""``laneway bench policies``: eviction policies on recorded training steps, in the simulated device.

Every trace is replayed under every link, budget, mode and policy. Time is virtual, so rows are the same on every machine; what
was measured is in the traces (``--record`` records them anew). A budget is a share of the trace's peak. The first steps, in which
predictions and choices are learned, are not counted. ``belady`` knows the future: it is a bound, not a choice.

Four targets are judged, over all cells that are there; a miss names its cells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from laneway.bench.rows import Report, Row
from laneway.core import InputError, LanewayError
from laneway.memory.link import Link
from laneway.memory.policies import POLICIES
from laneway.memory.replay import Outcome, replay
from laneway.memory.trace import Trace

LINKS = (200, 400, 1000)
"""MB/s each way."""
BUDGETS = (0.8, 0.63, 0.5)
"""Shares of the peak."""
MODES = {"demand": (False, False), "prefetch": (True, False), "prefetch+write-behind": (True, True)}
"""Whether there is a prefetch window, and write-behind."""
WINDOW = 0.4
"""Prefetch window, as a share of a step's compute."""
WARMUP = 3
"""Steps that are not counted; of long traces, a quarter."""

POINTS, STALL_OVER_LRU, BYTES_OVER_LRU, BYTES_OVER_BELADY = 1.0, 0.25, 0.7, 1.2
Cell = tuple[str, int, float, str]


@dataclass(frozen=True)
class PolicyOptions:
    """What is replayed."""

    traces: str = ""
    """Folder of ``*.json.gz``; empty for benchmarks/traces of the source checkout."""
    record: bool = False
    """Record the traces first, into that folder."""
    links: tuple[int, ...] = LINKS
    budgets: tuple[float, ...] = BUDGETS
    quick: bool = False

    def check(self) -> None:
        """Raise InputError where the folder holds no traces."""
        if not self.record and not list(self.folder().glob("*.json.gz")):
            raise InputError("traces", self.traces, "a folder with recorded *.json.gz traces, or --record")

    def folder(self) -> Path:
        """Where the traces are."""
        if self.traces:
            return Path(self.traces).expanduser()
        checkout = Path(__file__).resolve().parents[3] / "benchmarks"
        if not checkout.is_dir():
            raise InputError("traces", "", "--traces DIR", "laneway does not run from a source checkout here")
        return checkout / "traces"


def quick(options: PolicyOptions) -> PolicyOptions:
    """At most a minute on two cores: one link and one budget."""
    return replace(options, links=(200,), budgets=(0.63,), quick=True)


def run(options: PolicyOptions, progress: Callable[[str], None] = lambda line: None) -> Report:
    """Replay every cell; raises InputError where an option is out of range."""
    options.check()
    if options.record:
        from laneway.bench.policy_models import record_all

        record_all(options.folder(), progress)
    rows: list[Row] = []
    for path in sorted(options.folder().glob("*.json.gz")):
        trace = Trace.load(path)
        progress(f"{trace.name}: {len(trace.events)} events, {len(trace.steps)} steps, peak {trace.peak / 2**20:.0f} MiB")
        rows += [_row(options, trace, *cell) for cell in _cells(options)]
    summary, notes = judge(rows)
    if options.quick:
        notes.append("quick: ≤ 60 s on 2 cores; one link and one budget. Leave --quick out for the rest")
    return Report("policies", {"policies": rows}, summary, notes)


def _cells(options: PolicyOptions) -> Iterator[tuple[int, float, str, str]]:
    return (
        (link, budget, mode, policy)
        for link in options.links
        for budget in options.budgets
        for mode in MODES
        for policy in POLICIES
    )


def warmup(trace: Trace) -> int:
    """Steps that are not counted."""
    return min(max(WARMUP, len(trace.steps) // 4), len(trace.steps) - 1)


def _row(options: PolicyOptions, trace: Trace, link: int, budget: float, mode: str, policy: str) -> Row:
    prefetch, write_behind = MODES[mode]
    window = WINDOW * trace.seconds() / len(trace.steps) if prefetch else 0.0
    nbytes = int(budget * trace.peak)
    speed = Link(link * 1e6, link * 1e6)
    found: Outcome | None
    try:
        found = replay(trace, nbytes, policy, speed, prefetch=window, write_behind=write_behind, warmup=warmup(trace))
    except LanewayError:  # an operation does not fit: no policy can help
        found = None
    return {
        "trace": trace.name,
        "link_mb_s": link,
        "budget": budget,
        "mode": mode,
        "policy": policy,
        "variant": found and found.variant,
        "quick": int(options.quick),
        "steps": len(trace.steps) - warmup(trace),
        "budget_bytes": nbytes,
        "compute_s": found and found.compute_seconds,
        "time_s": found and found.seconds,
        "stall_s": found and found.stall_seconds,
        "overhead_percent": found and 100.0 * found.overhead,
        "bytes_out": found and found.bytes_out,
        "bytes_in": found and found.bytes_in,
        "recomputed_s": found and found.recompute_seconds,
        "evictions": found and found.evictions,
        "recomputations": found and found.recomputations,
        "peak_bytes": found and found.peak_bytes,
    }


def judge(rows: Sequence[Row]) -> tuple[dict[str, Any], list[str]]:
    """The targets' figures, and a line for each: pass, or miss with the cells."""
    cells: dict[Cell, dict[str, Row]] = {}
    for row in rows:
        if row["time_s"] is not None:
            cells.setdefault((row["trace"], row["link_mb_s"], row["budget"], row["mode"]), {})[row["policy"]] = row
    unfit = {tuple(row[key] for key in ("trace", "budget")) for row in rows if row["time_s"] is None}
    whole = {cell: by for cell, by in cells.items() if set(by) == set(POLICIES)}
    points = {cell: by["cost_aware"]["overhead_percent"] - by["lru"]["overhead_percent"] for cell, by in whole.items()}
    stalls = {cell: _stalls(by) for cell, by in whole.items() if _dense(cell)}
    demand = {cell: by for cell, by in whole.items() if cell[0] == "moe" and cell[3] == "demand"}
    over_lru = {cell: _ratio(by, "lru") for cell, by in demand.items()}
    over_belady = {cell: _ratio(by, "belady") for cell, by in demand.items()}
    lines = [
        _line("points of overhead over LRU, any cell", points, POINTS),
        _line("stall over LRU's, dense traces at 200 MB/s, 63 %, prefetch+write-behind", stalls, STALL_OVER_LRU),
        _line("bytes over LRU's, moe on demand", over_lru, BYTES_OVER_LRU),
        _line("bytes over belady's, moe on demand", over_belady, BYTES_OVER_BELADY),
    ]
    lines += [f"{name} at {share:g} of its peak: an operation does not fit, not replayed" for name, share in sorted(unfit)]
    figures: dict[str, float | None] = {
        "most_points_over_lru": _worst(points),
        "most_stall_over_lru": _worst(stalls),
        "most_bytes_over_lru": _worst(over_lru),
        "most_bytes_over_belady": _worst(over_belady),
    }
    return {"cost_aware": figures}, lines


def _dense(cell: Cell) -> bool:
    return cell[0] != "moe" and cell[1:] == (200, 0.63, "prefetch+write-behind")


def _stalls(by: Mapping[str, Row]) -> float | None:
    lru, ours = by["lru"]["stall_s"], by["cost_aware"]["stall_s"]
    return ours / lru if lru else None


def _ratio(by: Mapping[str, Row], other: str) -> float | None:
    ours, theirs = (by[name]["bytes_in"] + by[name]["bytes_out"] for name in ("cost_aware", other))
    return ours / theirs if theirs else None


def _worst(found: Mapping[Cell, float | None]) -> float | None:
    return max((value for value in found.values() if value is not None), default=None)


def _line(what: str, found: Mapping[Cell, float | None], limit: float) -> str:
    worst = _worst(found)
    if worst is None:
        return f"no cell: {what} (≤ {limit:g})"
    measured = {cell: value for cell, value in found.items() if value is not None}
    missed = {cell: value for cell, value in measured.items() if value > limit}
    head = f"{'miss' if missed else 'pass'}: {what}: {worst:.2f} (≤ {limit:g}; {len(measured)} cells)"
    return head + "".join(f"\n  {_name(cell)}: {value:.2f}" for cell, value in missed.items())


def _name(cell: Cell) -> str:
    trace, link, budget, mode = cell
    return f"{trace}, {link} MB/s, {budget:g}, {mode}"
