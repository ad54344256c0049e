"""``laneway bench quality``: the same training run with different residuals.

Same text, same batches in the same order, same weights at the start (the choices begin as the same function), same schedule.
All variants of a seed advance together, one step each in turns, so their step times are paired; the order moves on every step.
Validation loss is the mean over fixed batches; differences to the plain residual are paired by seed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from laneway.bench.memory import peak_bytes
from laneway.bench.rows import Report, Row
from laneway.bench.stats import Interval, mean_interval, spread
from laneway.bench.threads import using_threads
from laneway.bench.timer import Samples, ratio
from laneway.core import InputError, choices, positive_int
from laneway.models.gpt import RESIDUALS, GPTConfig
from laneway.train.config import OptimizerConfig, TrainConfig
from laneway.train.ranks import ranks_of_run
from laneway.train.schedule import learning_rate
from laneway.train.workbench import Workbench, build

# A variant is a change of the model's configuration.
VARIANTS: dict[str, dict[str, Any]] = {name: {"residual": name} for name in RESIDUALS}
VARIANTS["mhc-uncapped"] = {"residual": "mhc", "logit_cap": 0.0}
BASELINE = "residual"


@dataclass(frozen=True)
class QualityOptions:
    """What is trained."""

    variants: tuple[str, ...] = ("residual", "hc", "mhc")
    seeds: int = 3
    steps: int = 300
    lr: float = 3e-3
    layers: int = 8
    dim: int = 64
    context: int = 128
    batch_size: int = 8
    validation_batches: int = 32
    probe_every: int = 10
    threads: int = 0
    """0 for all."""
    quick: bool = False
    equal_time: bool = False
    """Also train the plain residual for as long as each other variant took."""

    def check(self) -> None:
        """Raise InputError for the first field that is out of range."""
        choices("variants", self.variants, VARIANTS)
        if BASELINE not in self.variants:
            raise InputError("variants", ",".join(self.variants), f"a list with {BASELINE}, which the others are compared with")
        for name in ("seeds", "steps", "batch_size", "validation_batches", "probe_every"):
            positive_int(name, getattr(self, name))
        positive_int("threads", self.threads, 0)
        self.config(BASELINE, 0).check()

    def config(self, variant: str, seed: int) -> TrainConfig:
        """The run of one variant and seed."""
        model = GPTConfig(layers=self.layers, heads=4, dim=self.dim, context=self.context)
        return TrainConfig(
            model=replace(model, **VARIANTS[variant]),
            optimizer=OptimizerConfig(lr=self.lr, warmup=0.1, floor=0.1),
            steps=self.steps,
            batch_size=self.batch_size,
            validation_batches=self.validation_batches,
            seed=seed,
            device="cpu" if not torch.accelerator.is_available() else "auto",
        )


def quick(options: QualityOptions) -> QualityOptions:
    """At most a minute on two cores: four narrow layers, few steps, and one thread, as threads only wait for each other there."""
    small = {"layers": 4, "dim": 32, "context": 64, "validation_batches": 8, "threads": 1}
    return replace(options, steps=min(options.steps, 40), quick=True, **small)


def run(options: QualityOptions, progress: Callable[[str], None] = lambda line: None) -> Report:
    """Train every variant with every seed; raises InputError where an option is out of range."""
    options.check()
    rows: list[Row] = []
    times = {name: Samples() for name in options.variants}
    with using_threads(options.threads):
        for seed in range(options.seeds):
            progress(f"seed {seed + 1} of {options.seeds}: {', '.join(options.variants)}, {options.steps} steps each")
            rows += _one_seed(options, seed, times)
        longer = _longer(options, rows, times, progress) if options.equal_time else []
    notes = []
    if options.quick:
        notes.append("quick: ≤ 60 s on 2 cores; a very small network, few steps, one thread: read its loss as a smoke test")
    tables = {"quality": rows} | ({"quality_time": longer} if longer else {})
    return Report("quality", tables, summarise(rows, times) | _time_summary(longer), notes)


def _longer(
    options: QualityOptions, rows: Sequence[Row], times: dict[str, Samples], progress: Callable[[str], None]
) -> list[Row]:
    """The plain residual with a schedule of as many steps as take a variant's time, by the ratio of their median step times."""
    found: list[Row] = []
    for name in options.variants:
        over = ratio(times[name], times[BASELINE]).value
        if name == BASELINE:
            continue
        longer = replace(options, steps=max(1, round(options.steps * over)), variants=(BASELINE,))
        for seed in range(options.seeds):
            progress(f"seed {seed + 1} of {options.seeds}: {BASELINE}, {longer.steps} steps, the time of {name}")
            (base,) = _one_seed(longer, seed, {BASELINE: Samples()})
            (own,) = (row for row in rows if (row["variant"], row["seed"]) == (name, seed))
            copied = ("seed", "lr", "layers", "dim", "context", "batch_size", "threads", "quick", "val_loss")
            found.append(
                {"variant": name, **{key: own[key] for key in copied}, "steps": own["steps"], "step_time_over_residual": over}
                | {"residual_steps": longer.steps, "residual_val_loss": base["val_loss"]}
                | {"val_loss_minus_residual": own["val_loss"] - base["val_loss"]}
            )
    return found


def _time_summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Per variant: its loss less that of the residual after as much time, paired by seed."""
    names = dict.fromkeys(row["variant"] for row in rows)
    paired = {name: [row["val_loss_minus_residual"] for row in rows if row["variant"] == name] for name in names}
    return {
        f"{name} at equal time": {"val_loss_minus_residual": mean_interval(values).as_json()} for name, values in paired.items()
    }


def _one_seed(options: QualityOptions, seed: int, times: dict[str, Samples]) -> list[Row]:
    """Train all variants side by side; appends the seconds of every step to ``times``."""
    with ranks_of_run("auto") as ranks:
        runs = {name: build(options.config(name, seed), ranks) for name in options.variants}
        gains = {name: {"gain_forward": 0.0, "gain_backward": 0.0} for name in runs}
        names = list(runs)
        for step in range(1, options.steps + 1):
            first = step % len(names)
            for name in names[first:] + names[:first]:
                wall, cpu = time.perf_counter(), time.process_time()
                batch = _step(options, runs[name], step, name, seed)
                times[name].cpu_s.append(time.process_time() - cpu)
                times[name].wall_s.append(time.perf_counter() - wall)
                if step % options.probe_every == 0 or step == options.steps:
                    figures = runs[name].evaluator.probe(batch[0])
                    gains[name] = {key: max(gains[name][key], float(figures.get(key, 1.0))) for key in gains[name]}
        return [_row(options, name, seed, runs[name], gains[name], times) for name in names]


def _step(options: QualityOptions, bench: Workbench, step: int, name: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    batch = next(bench.loader)
    lr = learning_rate(options.config(name, seed).optimizer, step, options.steps)
    bench.stepper(batch, lr, False, lambda: None)
    return batch


def _row(
    options: QualityOptions, name: str, seed: int, bench: Workbench, gains: dict[str, float], times: dict[str, Samples]
) -> Row:
    own, base = (times[key].last(options.steps) for key in (name, BASELINE))
    loss = bench.evaluator.validation_loss()
    batch = next(bench.loader)
    peak = peak_bytes(lambda: bench.stepper(batch, 0.0, False, lambda: None), bench.parallel.device)
    return {
        "variant": name,
        "seed": seed,
        "steps": options.steps,
        "lr": options.lr,
        "layers": options.layers,
        "dim": options.dim,
        "context": options.context,
        "batch_size": options.batch_size,
        "threads": torch.get_num_threads(),
        "quick": int(options.quick),
        "parameters": bench.parameters,
        "val_loss": loss,
        "val_bits_per_byte": bench.corpus.bits_per_byte(loss, "validation"),
        "step_ms": 1000 * statistics.median(own.wall_s),
        "step_cpu_ms": 1000 * statistics.median(own.cpu_s),
        "step_time_over_residual": ratio(own, base).value,
        "peak_bytes": peak,
        "gain_forward_max": gains["gain_forward"],
        "gain_backward_max": gains["gain_backward"],
    }


def summarise(rows: Sequence[Row], times: dict[str, Samples]) -> dict[str, Any]:
    """Per variant: validation loss (mean, its interval, standard deviation over seeds), paired difference, ratios, gains."""
    by_variant = {name: [row for row in rows if row["variant"] == name] for name in times}
    base = by_variant[BASELINE]
    summary: dict[str, Any] = {}
    for name, own in by_variant.items():
        losses = [row["val_loss"] for row in own]
        paired = [row["val_loss"] - other["val_loss"] for row, other in zip(own, base, strict=True)]
        memory = statistics.fmean(row["peak_bytes"] for row in own) / statistics.fmean(row["peak_bytes"] for row in base)
        summary[name] = {
            "val_loss": mean_interval(losses).as_json() | {"sd": spread(losses) if len(losses) > 1 else None},
            "val_loss_minus_residual": mean_interval(paired).as_json(),
            "step_time_over_residual": ratio(times[name], times[BASELINE]).as_json(),
            "step_memory_over_residual": Interval.exact(memory).as_json(),
            "gain_forward_max": max(row["gain_forward_max"] for row in own),
            "gain_backward_max": max(row["gain_backward_max"] for row in own),
        }
    return summary
