"""``laneway bench quality --long-context``: trained on short sequences, read on longer ones; loss by position.

Every variant trains on sequences of ``context`` tokens, as in ``laneway bench quality``. Its weights then go into the same model
with a longer rotary table, and long pieces of the validation text are read from their begin: the loss of position t is that of a
token with t tokens before it. Positions beyond ``context`` were never seen in training. Rows: one a run and stretch of positions,
each twice as long as the one before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from laneway.bench.quality import BASELINE, QualityOptions
from laneway.bench.rows import Report, Row
from laneway.bench.stats import mean_interval, spread
from laneway.bench.threads import using_threads
from laneway.core import positive_int
from laneway.data.loader import evaluation_batches
from laneway.models.gpt import GPT
from laneway.train.ranks import ranks_of_run
from laneway.train.schedule import learning_rate
from laneway.train.step import token_loss
from laneway.train.workbench import Workbench, build


@dataclass(frozen=True)
class LongContextOptions:
    """What is trained, and how far it is read."""

    variants: tuple[str, ...] = ("residual", "hc", "mhc")
    seeds: int = 3
    steps: int = 300
    lr: float = 3e-3
    layers: int = 8
    dim: int = 64
    context: int = 512
    read_to: int = 4096
    batch_size: int = 4
    sequences: int = 16
    """Pieces of validation text that are read."""
    threads: int = 0
    """0 for all."""
    quick: bool = False

    def check(self) -> None:
        """Raise InputError for the first field that is out of range."""
        for name in ("context", "sequences"):
            positive_int(name, getattr(self, name))
        positive_int("read_to", self.read_to, self.context)
        self.training.check()

    @property
    def training(self) -> QualityOptions:
        """The runs as ``laneway bench quality`` has them."""
        names = ("variants", "seeds", "steps", "lr", "layers", "dim", "context", "batch_size", "threads", "quick")
        return QualityOptions(**{name: getattr(self, name) for name in names})


def quick(options: LongContextOptions) -> LongContextOptions:
    """At most a minute on two cores: a narrow network, few steps, short sequences."""
    small = {"layers": 2, "dim": 32, "context": 64, "read_to": 512, "sequences": 4, "threads": 1}
    return replace(options, steps=min(options.steps, 30), seeds=min(options.seeds, 2), quick=True, **small)


def run(options: LongContextOptions, progress: Callable[[str], None] = lambda line: None) -> Report:
    """Train and read every variant with every seed; raises InputError where an option is out of range."""
    options.check()
    rows: list[Row] = []
    with using_threads(options.threads), ranks_of_run("auto") as ranks:
        for seed in range(options.seeds):
            for name in options.variants:
                progress(f"seed {seed + 1} of {options.seeds}: {name}, {options.steps} steps of {options.context} tokens")
                bench = build(options.training.config(name, seed), ranks)
                _train(options, bench, name, seed)
                rows += _rows(options, name, seed, loss_by_position(bench, options.read_to, options.sequences))
    notes = ["quick: ≤ 60 s on 2 cores; a very small network, few steps: a smoke test"] if options.quick else []
    return Report("quality", {"quality_context": rows}, summarise(rows), notes)


def _train(options: LongContextOptions, bench: Workbench, name: str, seed: int) -> None:
    optimizer = options.training.config(name, seed).optimizer
    for step in range(1, options.steps + 1):
        bench.stepper(next(bench.loader), learning_rate(optimizer, step, options.steps), False, lambda: None)


@torch.no_grad()
def loss_by_position(bench: Workbench, read_to: int, sequences: int) -> Tensor:
    """Mean loss in nats of each position [read_to], over ``sequences`` pieces of validation text (fewer where it has fewer)."""
    trained = bench.parallel.model
    model = GPT(replace(trained.config, context=read_to)).to(bench.parallel.device)
    model.load_state_dict(trained.state_dict())
    model.chained = trained.chained
    model.eval()
    total = torch.zeros(read_to, dtype=torch.float64)
    count = 0
    for inputs, targets in evaluation_batches(bench.corpus.validation, read_to, 1, sequences):
        inputs, targets = inputs.to(bench.parallel.device), targets.to(bench.parallel.device)
        total += token_loss(model(inputs), targets, reduction="none").double().cpu()
        count += 1
    return total / count


def stretches(context: int, read_to: int) -> list[tuple[int, int]]:
    """Positions [start, stop) in stretches that double, with a border at ``context``: …, context/2 … context, … to read_to."""
    borders = [context]
    while borders[0] >= 64:
        borders.insert(0, borders[0] // 2)
    while borders[-1] < read_to:
        borders.append(min(2 * borders[-1], read_to))
    return list(zip([0, *borders], borders, strict=False))


def _rows(options: LongContextOptions, name: str, seed: int, loss: Tensor) -> list[Row]:
    rows = []
    for start, stop in stretches(options.context, options.read_to):
        mean = loss[start:stop].mean().item()
        rows.append(
            {
                "variant": name,
                "seed": seed,
                "steps": options.steps,
                "lr": options.lr,
                "layers": options.layers,
                "dim": options.dim,
                "context": options.context,
                "batch_size": options.batch_size,
                "sequences": options.sequences,
                "quick": int(options.quick),
                "from_position": start,
                "to_position": stop,
                "loss": mean,
                "perplexity": math.exp(mean) if mean < 100 else math.inf,
            }
        )
    return rows


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """Per variant and stretch: loss over seeds, and its difference to the plain residual, paired by seed."""
    loss = {(row["variant"], row["to_position"], row["seed"]): row["loss"] for row in rows}
    summary: dict[str, Any] = {}
    for name, stop in dict.fromkeys((row["variant"], row["to_position"]) for row in rows):
        own = {seed: value for (v, s, seed), value in loss.items() if (v, s) == (name, stop)}
        paired = [value - loss[BASELINE, stop, seed] for seed, value in own.items()]
        summary[f"{name} to {stop}"] = {
            "loss": mean_interval(list(own.values())).as_json() | {"sd": spread(list(own.values())) if len(own) > 1 else None},
            "loss_minus_residual": mean_interval(paired).as_json(),
        }
    return summary
