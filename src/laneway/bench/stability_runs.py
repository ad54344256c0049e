"""One cell of ``laneway bench stability``: all seeds of a variant under a condition, and what became of each run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import torch

from laneway.bench.replicas import Replicas, ReplicaStep, narrow_streams
from laneway.bench.rows import Row
from laneway.bench.stability_conditions import CONDITIONS, STREAMS, Condition, corrupt, disturb, onset
from laneway.bench.stability_variants import VARIANTS
from laneway.core import Extension
from laneway.data.loader import BatchLoader, evaluation_batches
from laneway.data.text import Corpus
from laneway.models.gpt import GPT, GPTConfig
from laneway.train.config import OptimizerConfig, TrainConfig
from laneway.train.faults import NonfiniteGuard
from laneway.train.schedule import learning_rate
from laneway.train.workbench import seed_all

# A run has diverged when the loop's own guard would stop it, when it ends no better than a uniform guess over the bytes, or when
# it climbs back: its last validation lies CLIMB nats over the best of those after each quarter.
CLIMB, QUARTERS = 0.3, 4
# A fault is over when the loss on the same batches stays less than TOLERANCE nats over the twin's, in means of WINDOW steps.
TOLERANCE, WINDOW = 0.05, 5
POINTS = 40  # of a cell's curves
GAINS = ("gain_forward", "gain_backward")


@dataclass(frozen=True)
class Shape:
    """Size of the networks and of the runs."""

    dim: int = 32
    heads: int = 2
    context: int = 32
    batch_size: int = 2
    steps: int = 80
    warmup: float = 0.125
    validation_sequences: int = 64

    def under(self, condition: Condition) -> Shape:
        """This with what a condition changes."""
        return replace(self, **dict(condition.size))

    def config(self, variant: str, condition: Condition, seed: int) -> TrainConfig:
        """The run of one seed as ``laneway train`` would be told; a constant learning rate after the warm-up."""
        model = GPTConfig(layers=condition.layers, heads=self.heads, dim=self.dim, context=self.context)
        return TrainConfig(
            model=replace(model, **VARIANTS[variant].model),
            optimizer=OptimizerConfig(lr=condition.lr, warmup=self.warmup, floor=1.0),
            steps=self.steps,
            batch_size=self.batch_size,
            seed=seed,
            device="cpu",
        )


@dataclass(frozen=True)
class Curves:
    """What a cell's runs did: [steps, R] each; loss of the first validation batch [quarters, R], and of all of them [R]."""

    loss: np.ndarray
    norm: np.ndarray
    finite: np.ndarray
    gain_forward: np.ndarray
    gain_backward: np.ndarray
    purified: np.ndarray
    quarter_loss: np.ndarray
    val_loss: np.ndarray
    cpu_s: float


def run_unit(
    variant: str, unit: Sequence[str], seeds: Sequence[int], shape: Shape, corpus: Corpus, progress: Callable[[str], None]
) -> tuple[list[Row], list[Row]]:
    """A condition and those with a fault that are compared with it: one row a run, and one for each of POINTS steps of a cell."""
    rows: list[Row] = []
    over_steps: list[Row] = []
    clean: Curves | None = None
    for name in unit:
        own = shape.under(CONDITIONS[name])
        curves = train_cell(variant, CONDITIONS[name], seeds, own, corpus)
        clean = clean or curves
        made = [_row(variant, name, seed, index, own, curves, clean) for index, seed in enumerate(seeds)]
        diverged = sum(row["diverged"] for row in made)
        progress(f"{variant} under {name}: {diverged} of {len(made)} diverged; {curves.cpu_s:.0f} CPU seconds")
        rows += made
        over_steps += _over_steps(variant, name, curves)
    return rows, over_steps


def _over_steps(variant: str, name: str, curves: Curves) -> list[Row]:
    """Medians over the runs that are still finite, and the largest gain."""
    steps = len(curves.loss)
    return [
        {"variant": variant, "condition": name, "step": step, "runs": curves.loss.shape[1], "finite_runs": int(alive.sum())}
        | {f"{column}_median": _median(getattr(curves, column)[step - 1][alive]) for column in ("loss", "norm", *GAINS)}
        | {f"{column}_max": _largest(getattr(curves, column)[step - 1]) for column in GAINS}
        for step in np.unique(np.linspace(1, steps, min(POINTS, steps)).round().astype(int)).tolist()
        for alive in [curves.finite[step - 1] > 0]
    ]


def _median(values: np.ndarray) -> float | None:
    return float(np.median(values)) if len(values) else None


def build_replicas(
    variant: str, condition: Condition, seeds: Sequence[int], shape: Shape
) -> tuple[Replicas, list[list[Extension]]]:
    """The models of all seeds, as ``laneway train`` starts them, and each one's extensions."""
    models, extensions = [], []
    for seed in seeds:
        config = shape.config(variant, condition, seed)
        seed_all(seed)
        model = GPT(config.model)
        model.chained = True
        narrow_streams(model, STREAMS[condition.streams])
        models.append(model)
        extensions.append(VARIANTS[variant].prepare(model))
    return Replicas(models, shape.config(variant, condition, seeds[0]).optimizer), extensions


def train_cell(variant: str, condition: Condition, seeds: Sequence[int], shape: Shape, corpus: Corpus) -> Curves:
    """Train all seeds together. A seed's text and order are the same in every cell."""
    began = time.process_time()
    replicas, extensions = build_replicas(variant, condition, seeds, shape)
    loaders = [BatchLoader(corpus.train, shape.context, shape.batch_size, seed) for seed in seeds]
    optimizer, found, validation, purified = replicas.config, [], [], []
    for step in range(1, shape.steps + 1):
        _each(extensions, "on_step_begin", step)
        inputs, targets = (torch.stack(parts) for parts in zip(*map(next, loaders), strict=True))
        inputs, targets = corrupt(condition.fault, step, shape.steps, list(seeds), inputs, targets)

        def after(step: int = step) -> None:
            disturb(condition.fault, step, shape.steps, replicas)
            _each(extensions, "on_backward_end", step)

        outcome = replicas.step(inputs, targets, learning_rate(optimizer, step, shape.steps), after)
        found.append(outcome)
        purified.append(_end(extensions, step, outcome))
        if step % max(1, shape.steps // QUARTERS) == 0 or step == shape.steps:
            validation.append(_validate(replicas, shape, corpus, all_batches=step == shape.steps))
    columns = [
        torch.stack([getattr(outcome, name) for outcome in found]).double().numpy() for name in ("loss", "norm", "finite", *GAINS)
    ]
    loss, norm, finite, forward, backward = columns
    seconds = time.process_time() - began
    quarters = np.stack([batches[0] for batches in validation])
    return Curves(loss, norm, finite, forward, backward, np.array(purified), quarters, validation[-1].mean(0), seconds)


def _each(extensions: list[list[Extension]], call: str, step: int) -> None:
    for own in extensions:
        for extension in own:
            getattr(extension, call)(step)


def _end(extensions: list[list[Extension]], step: int, outcome: ReplicaStep) -> list[int]:
    """End a step as the loop does: extensions are given its row. Returns how many paths were purified in each run."""
    counts = []
    for own, loss, norm in zip(extensions, outcome.loss.tolist(), outcome.norm.tolist(), strict=True):
        row = {"loss": loss, "grad_norm": norm}
        for extension in own:
            extension.on_step_end(step, row)
        counts.append(int(row.get("purified_paths", 0)))
    return counts


def _validate(replicas: Replicas, shape: Shape, corpus: Corpus, all_batches: bool) -> np.ndarray:
    """Loss [batches, R] of validation sequences that are the same for all runs; without ``all_batches`` of the first batch."""
    size = min(16, shape.validation_sequences)
    batches = evaluation_batches(corpus.validation, shape.context, size, shape.validation_sequences // size)
    return torch.stack([replicas.loss(*batch) for batch in islice(batches, None if all_batches else 1)]).double().numpy()


def _row(variant: str, name: str, seed: int, index: int, shape: Shape, curves: Curves, clean: Curves) -> Row:
    condition = CONDITIONS[name]
    loss, finite = curves.loss[:, index], curves.finite[:, index] > 0
    val_loss = curves.val_loss[index]
    why, step = verdict(finite, curves.quarter_loss[:, index], TrainConfig().max_nonfinite)
    recovery = None
    if condition.fault:
        recovery = recovery_steps(loss, clean.loss[:, index], onset(shape.steps) - 1)
    gains = {f"{way}_max": _largest(getattr(curves, way)[:, index]) for way in GAINS}
    return {
        "variant": variant,
        "condition": name,
        "seed": seed,
        "layers": condition.layers,
        "dim": shape.dim,
        "context": shape.context,
        "batch_size": shape.batch_size,
        "steps": shape.steps,
        "lr": condition.lr,
        "streams_dtype": condition.streams,
        "fault": condition.fault,
        "diverged": int(bool(why)),
        "why": why,
        "diverged_step": step,
        "nonfinite_steps": int((~finite).sum()),
        "train_loss": float(loss[-max(1, len(loss) // 10) :].mean()),
        "val_loss": float(val_loss),
        "val_excess": float(val_loss - clean.val_loss[index]) if condition.fault else None,
        "recovery_steps": recovery,
        "purified_steps": int((curves.purified[:, index] > 0).sum()),
        "grad_norm_max": _largest(curves.norm[:, index]),
        **gains,
        "cpu_s": curves.cpu_s / curves.loss.shape[1],
    }


def _largest(values: np.ndarray) -> float | None:
    """Largest finite value over the run; None where there is none."""
    kept = values[np.isfinite(values)]
    return float(kept.max()) if len(kept) else None


def verdict(finite: np.ndarray, val_loss: np.ndarray, patience: int) -> tuple[str, int | None]:
    """("nonfinite", step at which the loop would stop), ("guess" or "climbed", last step), or ("", None): not diverged.

    ``finite`` [steps]: which steps were; ``val_loss``: the run's validations.
    """
    guard = NonfiniteGuard(patience)
    for step, fine in enumerate(finite.tolist(), start=1):
        guard.see(fine)
        if guard.exhausted:
            return "nonfinite", step
    if not val_loss[-1] < math.log(256):
        return "guess", len(finite)
    return ("climbed", len(finite)) if val_loss[-1] > np.nanmin(val_loss) + CLIMB else ("", None)


def recovery_steps(loss: np.ndarray, twin: np.ndarray, onset: int) -> int | None:
    """Steps from the fault, which begins at index ``onset``, until the loss is back at the twin's for good; None: it never is."""
    excess = (loss - twin)[onset:]
    excess = np.where(np.isfinite(excess), excess, np.inf)
    means = np.array([excess[i : i + WINDOW].mean() for i in range(len(excess) - WINDOW + 1)])
    above = np.flatnonzero(means >= TOLERANCE)
    if not len(above):
        return 0
    return int(above[-1]) + 1 if above[-1] < len(means) - 1 else None
