"""``laneway bench stability``: which residual and which mechanism keeps a run alive, and at what loss.

The same text in the same order, the same weights at the start for each seed, in a matrix of variants and conditions: learning
rates up to clearly too high, depth, bf16 and fp16 streams, batches of noise, gradient spikes once and on every step. All seeds of
a cell train together (replicas.py). Reported: the share of runs that diverged with its Wilson interval, the composite gain over
the run, the loss against plain mHC paired by seed, and how long after a fault the loss is back at that of the run without it.
Curves are medians over a cell's runs, of the cells that this call has run.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from laneway.bench.rows import Report, Row, append
from laneway.bench.stability_cells import cells_of, verdicts_of
from laneway.bench.stability_conditions import BASE, CONDITIONS, OF_MECHANISMS, units
from laneway.bench.stability_runs import Shape, run_unit
from laneway.bench.stability_variants import RESIDUALS, VARIANTS
from laneway.bench.stats import wilson
from laneway.bench.threads import using_threads
from laneway.core import InputError, LanewayError, choice, choices, positive_int
from laneway.data.text import TextDataConfig, prepare

KEY = ("variant", "condition", "seed")
# Conditions that separate the residuals in a few minutes.
QUICK = (BASE, "persistent", "lr-0.1", "fp16")


@dataclass(frozen=True)
class StabilityOptions:
    """The matrix, and where runs are kept."""

    variants: tuple[str, ...] = tuple(VARIANTS)
    conditions: tuple[str, ...] = ()
    """None: all for the residuals, and for mechanisms those of ``OF_MECHANISMS``."""
    seeds: int = 20
    shape: Shape = field(default_factory=Shape)
    runs: str = ""
    """CSV file that every run is appended to as soon as its cell ends; runs that it holds already are not run again."""
    quick: bool = False

    def check(self) -> None:
        """Raise InputError for the first field that is out of range."""
        choices("variants", self.variants, VARIANTS)
        for name in self.conditions:
            choice("conditions", name, CONDITIONS)
        positive_int("seeds", self.seeds)
        positive_int("steps", self.shape.steps, 20)
        if self.runs and not Path(self.runs).expanduser().parent.is_dir():
            raise InputError("runs", self.runs, "a file in an existing folder")

    def of(self, variant: str) -> tuple[str, ...]:
        """The conditions that a variant is run under."""
        return self.conditions or (tuple(CONDITIONS) if variant in RESIDUALS else OF_MECHANISMS)


def quick(options: StabilityOptions) -> StabilityOptions:
    """At most five minutes on one core: few seeds, and the conditions that separate the residuals."""
    named = options.conditions or QUICK
    chosen = tuple(name for name in named if name in QUICK) or named[:1]
    variants = RESIDUALS if options.variants == tuple(VARIANTS) else options.variants
    return replace(options, conditions=chosen, variants=variants, seeds=min(options.seeds, 4), quick=True)


def run(options: StabilityOptions, progress: Callable[[str], None] = lambda line: None) -> Report:
    """Run the cells that ``options.runs`` does not hold; raises InputError where an option is out of range."""
    options.check()
    path = Path(options.runs).expanduser() if options.runs else None
    done = read_runs(path) if path else []
    fresh: list[Row] = []
    curves: list[Row] = []
    began = time.process_time()
    with using_threads(1):
        corpus = prepare(TextDataConfig())
        for variant in options.variants:
            for unit in units(options.of(variant)):
                wanted = {(variant, name, seed) for name in unit for seed in range(options.seeds)}
                if wanted <= {tuple(row[key] for key in KEY) for row in done}:
                    continue
                made, over_steps = run_unit(variant, unit, range(options.seeds), options.shape, corpus, progress)
                curves += over_steps
                if path:
                    append(path, made)
                have = {tuple(row[key] for key in KEY) for row in made}
                done = [row for row in done if tuple(row[key] for key in KEY) not in have] + made
                fresh += made
    asked = [row for row in done if row["variant"] in options.variants and row["condition"] in options.of(str(row["variant"]))]
    notes = [f"{len(fresh)} runs in {time.process_time() - began:.0f} CPU seconds on one thread"]
    if options.quick:
        notes.append("quick: ≤ 5 minutes on one core; a few runs a cell say whether it works, not how often runs diverge")
    made_of = {"stability": cells_of(asked), "stability_verdicts": verdicts_of(asked), "stability_curves": curves}
    flag = {"quick": int(options.quick)}
    tables = {name: [row | flag for row in rows] for name, rows in made_of.items() if rows or name == "stability"}
    if not path:
        tables["stability_runs"] = fresh
    return Report("stability", tables, _summary(asked, options), notes)


def read_runs(path: Path) -> list[Row]:
    """Rows of a file of runs, the last of each key; none where there is no file.

    Raises:
        LanewayError: the file has no such columns.
    """
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if not set(KEY) <= set(reader.fieldnames or ()):
            raise LanewayError(f"{path}: no file of runs; it has no columns {', '.join(KEY)}")
        rows = [{key: _value(key, text) for key, text in row.items()} for row in reader]
    return list({tuple(row[key] for key in KEY): row for row in rows}.values())


def _value(key: str, text: str) -> Any:
    if key in ("variant", "condition", "why", "fault", "streams_dtype", "date", "laneway", "torch", "cpu", "device"):
        return text
    if not text:
        return None
    number = float(text)
    return int(number) if number.is_integer() and key not in ("lr", "val_loss", "train_loss") else number


def _summary(runs: Sequence[Row], options: StabilityOptions) -> dict[str, Any]:
    """Per variant, over all its runs without a fault: the share that diverged."""
    found = {}
    for variant in options.variants:
        own = [row for row in runs if row["variant"] == variant and not row["fault"]]
        if own:
            found[variant] = {"diverged_share": wilson(sum(row["diverged"] for row in own), len(own)).as_json()}
    return found
