"""``laneway bench symptoms``: runs that go wrong, and what doctor says of them.

Each recipe trains as it is; doctor examines the run directory; the first knob of its finding is turned as it says and the run is
made again, until the symptom is no longer found. A row is one such run: whether the finding was there, its evidence, the figure
that the rule watches with its limit, and what the run came to. Recipes that need a limit of memory train under the counting
allocator, in a process of their own.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from laneway.bench.rows import Report, Row
from laneway.bench.threads import using_threads
from laneway.core import InputError, LanewayError, choice, positive_int
from laneway.data.text import TextDataConfig
from laneway.doctor import RULES, Finding, Knob, Measure, RunFacts, examine_run, measures
from laneway.memory.counting import CountingAllocator
from laneway.memory.oom import out_of_memory, wanted_bytes
from laneway.rundir import number
from laneway.train.config import TrainConfig
from laneway.train.loop import train
from laneway.train.settings import merge

SECONDS = 600.0
"""A process that trains under a limit is ended after so long."""


@dataclass(frozen=True)
class SymptomOptions:
    """What is trained. A recipe has the name of the rule that is to find its symptom."""

    recipes: Mapping[str, TrainConfig]
    limits: Mapping[str, int] = field(default_factory=dict)
    """Bytes of tensors, by recipe."""
    seeds: int = 3
    turns: int = 4
    """How often a knob is turned at most."""
    data: TextDataConfig | None = None
    """Another text than the recipes'."""
    quick: bool = False

    def check(self) -> None:
        """Raise InputError for the first field that is out of range."""
        if not self.recipes:
            raise InputError("recipes", "", "one or more recipes")
        for name in self.recipes:
            choice("recipes", name, [rule.name for rule in RULES])
        positive_int("seeds", self.seeds)
        positive_int("turns", self.turns)


def quick(options: SymptomOptions) -> SymptomOptions:
    """At most a minute on two cores: one seed."""
    return replace(options, seeds=1, quick=True)


def run(options: SymptomOptions, progress: Callable[[str], None] = lambda line: None) -> Report:
    """Train, examine, turn, for every recipe and seed.

    Raises:
        InputError: an option is out of range.
        LanewayError: a recipe's process under a limit failed.
        BuildError: no compiler for the counting allocator, which recipes with a limit need.
    """
    options.check()
    rows: list[Row] = []
    for name in options.recipes:
        progress(f"{name}: {options.seeds} seeds, each as it is and with its knob turned")
        with using_threads(1):
            rows += _under_limit(options, name) if name in options.limits else _all_seeds(options, name)
    return Report("symptoms", {"symptoms": rows}, summarise(rows), ["quick: one seed"] if options.quick else [])


def turned(config: TrainConfig, knob: Knob) -> TrainConfig:
    """``config`` with a knob at the value that doctor gives it. Raises InputError where there is no such field or value."""
    section, _, leaf = knob.name.rpartition(".")
    try:
        value: Any = json.loads(knob.value)
    except json.JSONDecodeError:
        value = knob.value
    found, problems = merge(config, {section: {leaf: value}} if section else {leaf: value})
    for problem in [*problems, *found.problems()]:
        raise problem
    return found


def _all_seeds(options: SymptomOptions, name: str, allocator: CountingAllocator | None = None) -> list[Row]:
    return [row for seed in range(options.seeds) for row in _course(options, name, seed, allocator)]


def _course(options: SymptomOptions, name: str, seed: int, allocator: CountingAllocator | None) -> Iterator[Row]:
    """One run after another, until the symptom is gone, doctor gives no value, or the turns are used up."""
    config = replace(options.recipes[name], seed=seed)
    if options.data is not None:
        config = replace(config, data=options.data)
    knob: Knob | None = None
    for turn in range(options.turns + 1):
        with tempfile.TemporaryDirectory(prefix="laneway-symptoms-") as folder:
            outcome = _train(config, Path(folder) / "run", allocator, options.limits.get(name, 0))
            facts = RunFacts.read(Path(folder) / "run")
        findings = examine_run(facts)
        found = next((finding for finding in findings if finding.rule == name), None)
        yield _row(options, name, config, turn, knob, facts, findings, outcome)
        knob = next((each for each in found.knobs if each.value), None) if found else None
        if knob is None:
            return
        config = turned(config, knob)


@dataclass(frozen=True)
class _Outcome:
    """``peak`` and ``asked`` in bytes, under a limit: the most in use, and with what could not be had beside it."""

    completed: bool
    val_loss: float | None
    peak: int | None = None
    asked: int = 0


def _train(config: TrainConfig, out: Path, allocator: CountingAllocator | None, limit: int) -> _Outcome:
    if allocator is None:
        return _Outcome(True, train(config, out=out, console=None).val_loss)
    gc.collect()
    before = allocator.live
    allocator.reset_peak()
    allocator.limit(before + limit)
    wanted, val_loss = 0, None
    try:
        val_loss = train(config, out=out, console=None).val_loss
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        wanted = wanted_bytes(error)
    finally:
        allocator.limit(None)
    peak = allocator.peak - before
    return _Outcome(val_loss is not None, val_loss, peak, peak + wanted)


def _row(
    options: SymptomOptions, name: str, config: TrainConfig, turn: int, knob: Knob | None, facts: RunFacts,
    findings: Sequence[Finding], outcome: _Outcome,
) -> Row:  # fmt: skip
    found = next((finding for finding in findings if finding.rule == name), None)
    measure = measures(facts).get(name)
    if outcome.peak is not None:
        measure = Measure("tensors asked for over the limit", outcome.asked / options.limits[name], 1.0)
    loss = facts.series("loss").finite().blocks(20).values
    return {
        "recipe": name,
        "seed": config.seed,
        "steps": config.steps,
        "turn": turn,
        "knob": knob.flag if knob else "",
        "found": int(found is not None),
        "measure": measure.what if measure else "",
        "value": measure.value if measure else None,
        "limit": measure.limit if measure else None,
        "evidence": found.evidence if found else "",
        "others": " ".join(finding.rule for finding in findings if finding is not found),
        "completed": int(outcome.completed),
        "loss": float(loss[-1]) if len(loss) else None,
        "val_loss": outcome.val_loss,
        "peak_bytes": outcome.peak,
        "quick": int(options.quick),
    }


def _under_limit(options: SymptomOptions, name: str) -> list[Row]:
    """The same in a process of its own: its allocator can't be taken out again."""
    with tempfile.TemporaryDirectory(prefix="laneway-symptoms-") as folder:
        path = Path(folder) / "rows.json"
        process = multiprocessing.get_context("spawn").Process(target=_counted, args=(options, name, path))
        process.start()
        process.join(SECONDS)
        if process.is_alive():
            process.kill()
            process.join()
        if process.exitcode != 0:
            raise LanewayError(f"{name}: the process that trains it ended with exit code {process.exitcode}")
        return json.loads(path.read_text("utf-8"))


def _counted(options: SymptomOptions, name: str, path: Path) -> None:
    with using_threads(1):
        rows = _all_seeds(options, name, CountingAllocator.install())
    path.write_text(json.dumps(rows), "utf-8")


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """By recipe: seeds, in how many the symptom was found, in how many it was gone at last, the knob and its median turns."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys(row["recipe"] for row in rows):
        courses = [[row for row in rows if (row["recipe"], row["seed"]) == (name, seed)] for seed in _seeds(rows, name)]
        last = [course[-1] for course in courses]
        found[name] = {
            "seeds": len(courses),
            "found": sum(course[0]["found"] for course in courses),
            "gone": sum(1 - row["found"] for row in last),
            "turns": statistics.median(row["turn"] for row in last),
            "knobs": sorted({row["knob"] for course in courses for row in course if row["knob"]}),
            "val_loss_before": _mean(course[0]["val_loss"] for course in courses),
            "val_loss_after": _mean(row["val_loss"] for row in last),
        }
    return found


def _seeds(rows: Sequence[Row], name: str) -> list[int]:
    return list(dict.fromkeys(row["seed"] for row in rows if row["recipe"] == name))


def _mean(values: Iterator[float | None]) -> float | None:
    finite = [value for value in values if number(value) == number(value)]
    return statistics.fmean(value for value in finite if value is not None) if finite else None
