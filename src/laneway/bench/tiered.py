"""``laneway bench memory``: a training step under a budget of memory, against plain training and other ways to need less.

All variants train one model in turns, in one process and under one allocator, which counts every byte of every tensor. The peak
is the most bytes alive in a step, parameters, gradients and optimizer state included. Before the rounds each variant computes the
gradients of one batch, and they are compared with those of plain training bit for bit.

β says what is possible: bytes that the forward pass saves per second over what the tier takes per second. The table
``memory_virtual`` has a tier of a chosen bandwidth whose time is modelled: it passes on a clock of main-thread CPU seconds plus
the waiting, so that β can be set on any machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from laneway.bench.rows import Report, Row
from laneway.bench.stats import parts
from laneway.bench.threads import using_threads
from laneway.bench.tiered_limits import batch_rows, small, spike_rows
from laneway.bench.tiered_models import MODELS, SIZES, Size
from laneway.bench.tiered_peers import PEERS
from laneway.bench.tiered_steps import step_rows
from laneway.bench.tiered_subject import STATES, Subject
from laneway.bench.tiered_variants import at_equal_peak, managed, peers, with_states
from laneway.bench.tiered_virtual import solver_rows, virtual_rows
from laneway.core import InputError, choice, choices, positive_int
from laneway.memory.counting import CountingAllocator

DTYPES = ("fp32", "bf16")
TABLES = {"steps": "memory", "virtual": "memory_virtual", "spikes": "memory_spike", "batches": "memory_batch",
          "solver": "memory_solver"}  # fmt: skip
WITH_DIAL = ("checkpoint", "compile")


@dataclass(frozen=True)
class MemoryOptions:
    """What to measure.

    Attributes:
        models: ``gpt``, ``llama``.
        dtype: ``fp32``, ``bf16`` (autocast).
        tables: names of ``TABLES``.
        budgets: as parts of plain training's peak.
        peers: names of ``PEERS`` beside plain training, at the peak they have.
        equal_peak: which of ``WITH_DIAL`` are also turned until their peak is that of the budgets.
        states: ways of ``STATES`` to hold the optimizer's state, each on its own and under ``totals``.
        totals: budgets, as parts of plain training's peak, for managed steps with those states.
        virtual: bandwidths of simulated tiers, in MB/s.
        folder: of the disk tier's file.
        seconds: time budget of the rounds of a model and dtype.
        spikes: steps of so many times the length under a hard limit somewhat above plain training's peak; up to 6.
        size: of the network.
    """

    models: tuple[str, ...] = ("gpt", "llama")
    dtype: tuple[str, ...] = ("fp32", "bf16")
    tables: tuple[str, ...] = tuple(TABLES)
    budgets: tuple[float, ...] = (0.63, 0.5)
    peers: tuple[str, ...] = ("checkpoint", "selective", "save_on_cpu", "torch_save")
    equal_peak: tuple[str, ...] = WITH_DIAL
    states: tuple[str, ...] = ("streamed", "8bit", "4bit", "streamed-8bit")
    totals: tuple[float, ...] = (0.4,)
    virtual: tuple[float, ...] = (200.0,)
    folder: str = ""
    seconds: float = 120.0
    spikes: tuple[float, ...] = (1.0, 2.0, 3.0, 4.0, 5.5)
    size: Size = field(default_factory=Size)

    def check(self) -> None:
        """Raise InputError for the first field that is wrong."""
        known = {"models": MODELS, "dtype": DTYPES, "tables": TABLES, "equal_peak": WITH_DIAL}
        known |= {"peers": [p for p in PEERS if p != "none"], "states": [s for s in STATES if s != "resident"]}
        for name, names in known.items():
            if name in ("models", "dtype", "tables") or getattr(self, name):
                choices(name, getattr(self, name), names)
        for name in ("budgets", "totals"):
            for share in getattr(self, name):
                if not 0 < share < 1:
                    raise InputError(name, share, "parts of plain training's peak, above 0 and below 1")
        for bandwidth in self.virtual:
            if not bandwidth > 0:
                raise InputError("virtual", bandwidth, "MB/s > 0")
        for factor in self.spikes:
            if not 0 < factor <= self.size.longest:
                raise InputError("spikes", factor, f"lengths as multiples, above 0 and at most {self.size.longest}")
        positive_int("seconds", int(self.seconds))


def sized(name: str) -> Size:
    """The network and batch of this name; raises InputError where there is none."""
    return SIZES[choice("size", name, SIZES)]


def quick(options: MemoryOptions) -> MemoryOptions:
    """At most a minute on two cores: a small network, one model and budget, nothing compiled; batches only if asked for alone."""
    first = {name: getattr(options, name)[:1] for name in ("models", "dtype", "budgets", "totals", "virtual")}
    equal = tuple(name for name in options.equal_peak if name != "compile")
    tables = tuple(name for name in options.tables if name != "batches") or options.tables
    few = {
        "peers": ("checkpoint",),
        "equal_peak": equal,
        "states": options.states[:2],
        "spikes": options.spikes[1:2] or options.spikes,
    }
    return replace(options, **first, **few, tables=tables, seconds=5.0, size=SIZES["quick"])


def run(options: MemoryOptions, progress: Callable[[str], None] = lambda line: None) -> Report:
    """Measure; the rows go to the tables of ``TABLES``."""
    allocator = CountingAllocator.installed() or CountingAllocator.install(caching=True)
    tables: dict[str, list[Row]] = {TABLES[name]: [] for name in TABLES if name in options.tables}
    summary: dict[str, Any] = {}
    notes: list[str] = []

    def say(line: str) -> None:
        progress(line)
        if "left out" in line or "does not come down" in line:
            notes.append(line.strip())

    with using_threads(1):
        for name in options.models:
            for dtype in options.dtype:
                _measure(options, name, dtype, allocator, tables, summary, say)
    return Report("memory", tables, summary, notes)


def _measure(
    options: MemoryOptions,
    name: str,
    dtype: str,
    allocator: CountingAllocator,
    tables: dict[str, list[Row]],
    summary: dict[str, Any],
    say: Callable[[str], None],
) -> None:
    """Everything of one model and dtype."""
    with Subject(name, dtype, options.size, options.folder, allocator) as subject:
        say(f"{name} {dtype}: plain peak {subject.plain_peak / 2**20:.0f} MiB, β {subject.beta or 0.0:.2f}")
        if "steps" in options.tables:
            variants = peers(subject, options.peers)
            variants += at_equal_peak(subject, options.equal_peak, options.budgets, say)
            variants += managed(subject, options.budgets)
            variants += with_states(subject, options.states, options.totals)
            found = step_rows(subject, variants, options.seconds, say)
            tables["memory"] += found
            summary[f"{name} {dtype}"] = _summary(found)
        if "virtual" in options.tables:
            tables["memory_virtual"] += virtual_rows(subject, options.virtual, options.budgets, say)
        if "solver" in options.tables:
            tables["memory_solver"] += solver_rows(subject, options.virtual, options.budgets, say)
        if "spikes" in options.tables:
            tables["memory_spike"] += spike_rows(subject, options.spikes, say)
    if "batches" in options.tables:
        with Subject(name, dtype, small(options.size), options.folder, allocator) as subject:
            tables["memory_batch"] += batch_rows(subject, say)


def _summary(rows: list[Row]) -> dict[str, Any]:
    found: dict[str, Any] = {"β": rows[0]["beta"]}
    for row in rows:
        if row["variant"] != "none":
            found[f"{row['variant']}: peak over none"] = row["peak_ratio"]
            found[f"{row['variant']}: wall over none"] = parts(row, "wall_over_none")
            found[f"{row['variant']}: main CPU over none"] = parts(row, "main_cpu_over_none")
    return found
