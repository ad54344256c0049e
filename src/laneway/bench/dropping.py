"""What dropping gradients costs in loss and saves in bytes: the same small training run with different droppers.

Members are processes of this machine, each standing for a host, so that everything they exchange would cross hosts. All runs of a
seed begin from the same weights and see the same batches; each member takes its part of a batch. Gradients are summed by
`GradientDropper` alone, divided by the number of members, clipped, and given to AdamW. Bytes are counted where messages are sent.

The bytes of flat ZeRO-3 are counted too: parameters in bf16 gathered twice (forward and backward) and gradients in fp32
scattered, over all members. Dropping compares with it where parameters are sharded inside a host, so that only gradients cross.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp

from laneway.bench.dropping_member import member_main
from laneway.bench.rows import Report, Row
from laneway.bench.stats import mean_interval
from laneway.cluster.drop.sizes import drop_for_saving
from laneway.core import choices, positive_int

__all__ = ["BASELINE", "VARIANTS", "DroppingOptions", "dropping_rows", "quick", "run"]

BASELINE = "dense fp32"
# A variant is what `GradientDropper` is given.
VARIANTS: dict[str, dict[str, Any]] = {
    BASELINE: {"drop": 0.0},
    "dense bf16": {"drop": 0.0, "wire": "bf16"},
    "-40% fp32": {"drop": drop_for_saving(0.405, "fp32")},
    "-40% fp32, no feedback": {"drop": drop_for_saving(0.405, "fp32"), "feedback": False},
    "-40% bf16": {"drop": drop_for_saving(0.405, "bf16"), "wire": "bf16"},
    "-40% bf16, residuals fp32": {"drop": drop_for_saving(0.405, "bf16"), "wire": "bf16", "residual": "fp32"},
    "-40% int8": {"drop": drop_for_saving(0.405, "int8"), "wire": "int8"},
    "blocks 10% bf16": {"drop": 0.9, "wire": "bf16"},
    "blocks 10% bf16, warm-up": {"drop": 0.9, "wire": "bf16", "warmup": 50},
    "blocks 10% bf16, no feedback": {"drop": 0.9, "wire": "bf16", "feedback": False},
    "entries 10% bf16": {"drop": 0.9, "wire": "bf16", "unit": "entries"},
}


@dataclass(frozen=True)
class DroppingOptions:
    """What is trained."""

    variants: tuple[str, ...] = tuple(VARIANTS)
    seeds: int = 3
    steps: int = 300
    members: int = 4
    lr: float = 3e-3
    layers: int = 2
    dim: int = 64
    context: int = 64
    batch_size: int = 16
    """Sequences of all members together."""
    validation_batches: int = 16
    quick: bool = False

    def check(self) -> None:
        """Raise InputError for the first field that is out of range."""
        choices("variants", self.variants, VARIANTS)
        for name in ("seeds", "steps", "members", "layers", "batch_size", "validation_batches"):
            positive_int(name, getattr(self, name))
        positive_int("members", self.members, 2)


def quick(options: DroppingOptions) -> DroppingOptions:
    """About a minute on two cores: three variants, one seed, a few steps."""
    names = (BASELINE, "-40% bf16", "blocks 10% bf16")
    return replace(options, variants=names, seeds=1, steps=min(options.steps, 40), validation_batches=4, quick=True)


def run(options: DroppingOptions, progress: Callable[[str], None] = lambda line: None) -> Report:
    """Train every variant with every seed.

    Raises:
        InputError: an option is out of range.
    """
    rows, counted = dropping_rows(options, progress)
    notes = ["quick: few steps of a very small network: read its loss as a smoke test"] if options.quick else []
    return Report("dropping", {"dropping": rows, "dropping_bytes": counted}, summarise(rows, counted), notes)


def dropping_rows(options: DroppingOptions, progress: Callable[[str], None] = lambda line: None) -> tuple[list[Row], list[Row]]:
    """Rows of the training runs (one a variant and seed), and of the bytes of one step (one a scheme).

    Raises:
        InputError: an option is out of range.
    """
    options.check()
    count = len(options.variants) * options.seeds
    progress(f"{count} runs of {options.steps} steps on {options.members} processes")
    with tempfile.TemporaryDirectory(prefix="laneway-dropping-") as folder:
        given = {"options": asdict(options), "variants": {name: VARIANTS[name] for name in options.variants}}
        (Path(folder) / "given.json").write_text(json.dumps(given), "utf-8")
        mp.start_processes(member_main, args=(folder, options.members), nprocs=options.members, start_method="spawn")
        found = json.loads((Path(folder) / "found.json").read_text("utf-8"))
    dense = {row["seed"]: row["val_loss"] for row in found["runs"] if row["variant"] == BASELINE}
    rows = [row | {"val_loss_over_dense": row["val_loss"] - dense[row["seed"]] if dense else None} for row in found["runs"]]
    return rows, found["bytes"]


def summarise(rows: Sequence[Row], counted: Sequence[Row]) -> dict[str, Any]:
    """Mean paired difference of each variant to the dense run with its 95 % interval, the spread of seeds, and saved bytes."""
    losses = [row["val_loss"] for row in rows if row["variant"] == BASELINE]
    spread = statistics.stdev(losses) if len(losses) > 1 else None
    found: dict[str, Any] = {"seed_spread": spread}
    for name in dict.fromkeys(row["variant"] for row in rows):
        own = [row for row in rows if row["variant"] == name]
        if losses and name != BASELINE:
            found[f"{name}: val_loss_over_dense"] = mean_interval([row["val_loss_over_dense"] for row in own])
        found[f"{name}: saved_share"] = own[0]["saved_share"]
    return found | {f"{row['scheme']}: saved_over_zero3": row["saved_over_zero3"] for row in counted}
