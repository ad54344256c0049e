"""``laneway bench step``: a whole training step with hyper-connections over the same step with plain residuals.

A step is what ``laneway train`` runs: forward, loss, backward, clipping, AdamW. All variants take turns in one process; the ratio
to the plain residual is taken within the rounds. ``connections_ms`` is the time inside laneway's own ops in one profiled step, so
that a row says how much of the difference they are; the rest is what streams cost outside them (expanding, norms of what is
bigger, cache that they take from others) and noise.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from laneway.bench.layer import ALLOCATORS
from laneway.bench.memory import peak_bytes, recorded
from laneway.bench.rows import Report, Row
from laneway.bench.stats import parts
from laneway.bench.threads import using_threads
from laneway.bench.timer import Samples, interleave, ratio
from laneway.bench.training import TrainingStep
from laneway.connections import use_backend
from laneway.core import InputError, choice, choices, positive_int
from laneway.memory.allocator import keep_freed_memory
from laneway.models.gpt import GPTConfig
from laneway.train.config import PRECISIONS, TrainConfig
from laneway.train.ranks import Ranks, ranks_of_run

BASELINE = "residual"
# name: what it is, in the model's configuration, the run's, and how its blocks are joined.
VARIANTS: dict[str, dict[str, Any]] = {
    "residual": {"residual": "residual"},
    "mhc": {"residual": "mhc"},
    "mhc_recompute": {"residual": "mhc", "recompute_streams": True},
    "mhc_unchained": {"residual": "mhc", "chained": False},
    "mhc_torch": {"residual": "mhc", "backend": "torch"},
}


@dataclass(frozen=True)
class StepOptions:
    """What is measured."""

    variants: tuple[str, ...] = ("residual", "mhc", "mhc_unchained", "mhc_torch")
    dtypes: tuple[str, ...] = ("fp32", "bf16")
    layers: int = 12
    dim: int = 512
    context: int = 512
    batch_size: int = 2
    threads: int = 0
    """0 for all."""
    allocator: str = "tuned"
    seconds: float = 100.0
    """Time budget of the rounds of one dtype."""
    quick: bool = False

    def check(self) -> None:
        """Raise InputError for the first field that is out of range."""
        choices("variants", self.variants, VARIANTS)
        if BASELINE not in self.variants:
            raise InputError("variants", ",".join(self.variants), f"a list with {BASELINE}, which the others are compared with")
        choices("dtype", self.dtypes, PRECISIONS)
        choice("allocator", self.allocator, ALLOCATORS)
        positive_int("threads", self.threads, 0)
        if not 0 < self.seconds < float("inf"):
            raise InputError("seconds", self.seconds, "a number > 0")
        for name in self.variants:
            self.config(name, "fp32").check()

    def config(self, variant: str, dtype: str) -> TrainConfig:
        """The run whose step is measured."""
        given = VARIANTS[variant]
        model = GPTConfig(residual=given["residual"], dim=self.dim, layers=self.layers, context=self.context, heads=8)
        recompute = given.get("recompute_streams", False)
        return TrainConfig(model=model, batch_size=self.batch_size, precision=dtype, parallel="none", recompute_streams=recompute)


def quick(options: StepOptions) -> StepOptions:
    """At most a minute on two cores: two narrow layers, one thread, few rounds."""
    small = {"dim": min(options.dim, 128), "layers": min(options.layers, 2), "context": min(options.context, 128)}
    return replace(options, **small, threads=1, seconds=6.0, quick=True)


def run(options: StepOptions, progress: Callable[[str], None] = lambda line: None) -> Report:
    """Measure every variant in every dtype; raises InputError where an option is out of range."""
    options.check()
    rows: list[Row] = []
    tuned = options.allocator == "tuned" and keep_freed_memory()
    try:
        with using_threads(options.threads), ranks_of_run("auto") as ranks:
            for dtype in options.dtypes:
                progress(f"{', '.join(options.variants)} in {dtype}, about {options.seconds:.0f} s")
                rows += _one_dtype(options, dtype, ranks)
    finally:
        if tuned:
            keep_freed_memory(False)
    notes = []
    if options.allocator == "tuned" and not tuned:
        notes.append("the allocator is not glibc's: it was not tuned")
    if options.quick:
        notes.append("quick: ≤ 60 s on 2 cores; two narrow layers, few rounds. Leave --quick out for the rest")
    return Report("step", {"step": rows}, summarise(rows), notes)


def _one_dtype(options: StepOptions, dtype: str, ranks: Ranks) -> list[Row]:
    steps = {name: _step(options, name, dtype, ranks) for name in options.variants}
    samples = interleave(steps, seconds=options.seconds, min_rounds=3 if options.quick else 7, warmup=2)
    rows = [_row(options, name, dtype, steps[name], samples, ranks.device) for name in steps]
    steps.clear()
    gc.collect()
    return rows


def _step(options: StepOptions, variant: str, dtype: str, ranks: Ranks) -> Callable[[], None]:
    step = TrainingStep(options.config(variant, dtype), ranks)
    given = VARIANTS[variant]
    step.model.chained = given.get("chained", step.model.chained)

    def call() -> None:
        with use_backend(given["backend"]) if "backend" in given else nullcontext():
            step()

    return call


def _row(
    options: StepOptions, variant: str, dtype: str, step: Callable[[], None], samples: dict[str, Samples], device: torch.device
) -> Row:
    own = samples[variant]
    over = ratio(own, samples[BASELINE])
    connections = connection_ms(step)
    return {
        "variant": variant,
        "dtype": dtype,
        "layers": options.layers,
        "dim": options.dim,
        "context": options.context,
        "batch_size": options.batch_size,
        "threads": torch.get_num_threads(),
        "allocator": options.allocator,
        "quick": int(options.quick),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        **own.columns(),
        **over.columns("over_residual"),
        "connections_ms": connections,
        "peak_bytes": peak_bytes(step, device),
    }


def connection_ms(step: Callable[[], object]) -> float:
    """Milliseconds inside laneway's ops, on the host, in one step."""
    events = [event for event in recorded(step).events() or () if _own(event) and not _inside(event)]
    return sum(event.time_range.elapsed_us() for event in events) / 1000


def _own(event: Any) -> bool:
    return event.name.startswith("laneway::")


def _inside(event: Any) -> bool:
    """Whether the event is part of another of our ops: one call shows up at several levels of the dispatcher."""
    parent = event.cpu_parent
    while parent is not None and not _own(parent):
        parent = parent.cpu_parent
    return parent is not None


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """By dtype and variant: how many times longer a step takes than with plain residuals."""
    summary: dict[str, Any] = {}
    for row in rows:
        if row["variant"] != BASELINE:
            entry = summary.setdefault(f"{row['dtype']} {row['threads']}t", {})
            entry[f"{row['variant']}_over_residual"] = parts(row, "over_residual")
    return summary
