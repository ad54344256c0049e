"""``laneway bench lora``: fine-tunes with a mistake, and whether the consistency check says so before the loss does.

A small mHC model is pretrained on the standard library's sources, then fine-tuned with adapters on the library's prose (the
topics of ``help()``). The loss shows a mistake at the first validation that is more than three standard deviations above the
mean of healthy runs of the same setting, or by an exception of the model.
"""

from __future__ import annotations

import importlib.util
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from laneway.bench.lora_cases import BROKEN, HEALTHY, HELD_OUT
from laneway.bench.lora_run import Case, Outcome, Run, Setting, Trained
from laneway.bench.rows import Report, Row
from laneway.bench.threads import using_threads
from laneway.connections.consistency import ConsistencyCheck
from laneway.core import InputError, choice, positive_int
from laneway.data.loader import evaluation_batches
from laneway.models.gpt import GPT, GPTConfig
from laneway.train.config import OptimizerConfig, TrainConfig
from laneway.train.ranks import ranks_of_run
from laneway.train.schedule import learning_rate
from laneway.train.workbench import build

DEVIATIONS = 3.0
CASES = {case.name: case for case in [*HEALTHY, *BROKEN, *HELD_OUT]}
PEFT = ("target-embedding", "target-readout", "peft")


@dataclass(frozen=True)
class LoRAOptions:
    """What is trained."""

    cases: tuple[str, ...] = ()
    """Names of broken cases; () for all."""
    held_out: bool = True
    """Whether the cases that were kept out of development run."""
    seeds: int = 5
    """Healthy runs of the setting that most losses are compared with; other settings have two fewer, but at least two."""
    steps: int = 30
    """Optimizer steps of a fine-tune."""
    pretrain: int = 300
    layers: int = 2
    dim: int = 48
    threads: int = 1
    """0 for all."""
    quick: bool = False

    def check(self) -> None:
        """Raise InputError for the first field that is out of range."""
        broken = [case.name for case in [*BROKEN, *HELD_OUT]]
        for name in self.cases:
            choice("cases", name, broken)
        positive_int("seeds", self.seeds, 2)
        for name in ("steps", "pretrain"):
            positive_int(name, getattr(self, name))
        positive_int("threads", self.threads, 0)
        self.config().check()

    def config(self) -> TrainConfig:
        """The pretraining run."""
        setting = self.setting()
        model = GPTConfig(layers=self.layers, heads=4, dim=self.dim, context=setting.context, residual="mhc", init_std=0.05)
        optimizer = OptimizerConfig(lr=3e-3, warmup=0.1, floor=0.1)
        return TrainConfig(
            model=model, optimizer=optimizer, steps=self.pretrain, batch_size=8, validation_batches=1, device="cpu"
        )

    def setting(self) -> Setting:
        """The healthy fine-tune."""
        return replace(Setting(), steps=self.steps)

    def chosen(self) -> list[Case]:
        """The broken cases."""
        known = [*BROKEN, *(HELD_OUT if self.held_out else [])]
        return [CASES[name] for name in self.cases] if self.cases else known


def quick(options: LoRAOptions) -> LoRAOptions:
    """At most a minute on two cores: two narrow layers, few steps, two seeds, a handful of mistakes."""
    few = options.cases or ("scaling-x1000", "b-not-zero", "comb-transposed", "double-merge", "load-layer-shift", "nan-batch")
    return replace(options, cases=few, seeds=2, steps=min(options.steps, 15), pretrain=40, layers=2, dim=32, quick=True)


def run(options: LoRAOptions, progress: Callable[[str], None] = lambda line: None) -> Report:
    """Pretrain, fine-tune healthily, then with every mistake; raises InputError where an option is out of range."""
    options.check()
    notes = []
    if options.quick:
        notes.append("quick: ≤ 60 s on 2 cores; a handful of mistakes in a very small network: a smoke test, not a rate")
    broken = options.chosen()
    if importlib.util.find_spec("peft") is None:
        notes.append(
            f"peft is not installed: left out {', '.join(case.name for case in broken if case.name in PEFT) or 'nothing'}"
        )
        broken = [case for case in broken if case.name not in PEFT]
    with using_threads(options.threads):
        desk = _Desk(options, progress)
        healthy = desk.healthy(broken)
        rows = [desk.row(case, seed, outcome, True) for case, seed, outcome in healthy]
        for number, case in enumerate(broken, start=1):
            outcome = desk.fine_tune(case, 0)
            rows.append(desk.row(case, 0, outcome, False))
            progress(f"{number} of {len(broken)}: {case.name}: {rows[-1]['order']} {rows[-1]['measure'] or ''}")
    return Report("lora", {"lora": rows, "lora_summary": summary_rows(rows)}, summarise(rows), notes)


class _Desk:
    """The pretrained model, the text, and the healthy runs by which others are judged."""

    def __init__(self, options: LoRAOptions, progress: Callable[[str], None]) -> None:
        self.options, self.progress = options, progress
        self.tokens = prose()
        self.model = self._pretrain()
        setting = options.setting()
        sample = next(iter(evaluation_batches(self.tokens[0], setting.context, 2, 1)))[0]
        self.reference = ConsistencyCheck(self.model, sample, "record", tokens=2 * setting.context).state_dict()
        self.starts: dict[str, Trained] = {}
        self.losses: dict[str, list[dict[int, float]]] = {}

    def _pretrain(self) -> GPT:
        config = self.options.config()
        with ranks_of_run("cpu") as ranks:
            bench, loss = build(config, ranks), math.nan
            for step in range(1, config.steps + 1):
                lr = learning_rate(config.optimizer, step, config.steps)
                loss = bench.stepper(next(bench.loader), lr, False, lambda: None).loss
            self.progress(f"pretrained: loss {loss:.3f} after {config.steps} steps")
            return bench.parallel.model

    def fine_tune(self, case: Case, seed: int, keep: bool = False) -> Outcome:
        """One run."""
        start = self.starts[case.resumes] if case.resumes else None
        return Run(case, self.model, self.reference, self.tokens, seed, self.options.setting(), start, keep).go()

    def healthy(self, broken: Sequence[Case]) -> list[tuple[Case, int, Outcome]]:
        """Every healthy case: with all seeds where losses are compared with it, else with one."""
        wanted = {case.like for case in broken} | {"default"}
        wanted |= {CASES[name].resumes for name in wanted} | {case.resumes for case in broken}
        done = []
        for case in HEALTHY:
            if (self.options.quick and case.name not in wanted) or (
                case.name in PEFT and importlib.util.find_spec("peft") is None
            ):
                continue
            seeds = self.options.seeds if case.name in ("default", "resumed") else max(2, self.options.seeds - 2)
            for seed in range(seeds if case.name in wanted else 1):
                outcome = self.fine_tune(case, seed, keep=seed == 0 and not case.resumes and case.name != "peft")
                self.losses.setdefault(case.name, []).append(outcome.losses)
                if outcome.trained is not None:
                    self.starts[case.name] = outcome.trained
                done.append((case, seed, outcome))
            self.progress(f"healthy: {case.name}")
        return done

    def bound(self, like: str, step: int, without: int | None = None) -> float:
        """The largest loss of a healthy run at a step: mean + 3 sd, the sd at least that of the default runs over all steps."""
        curves = [losses for index, losses in enumerate(self.losses[like]) if index != without]
        own = [losses[step] for losses in curves]
        usual = self.losses["default"]
        pooled = [statistics.stdev(losses[s] for losses in usual) for s in usual[0] if s > 0]
        sd = max(statistics.stdev(own) if len(own) > 1 else 0.0, math.sqrt(statistics.fmean(v * v for v in pooled)))
        return statistics.fmean(own) + DEVIATIONS * sd

    def shown(self, case: Case, outcome: Outcome, without: int | None) -> int | None:
        """The first step at which the loss, or an exception, shows that something is wrong."""
        steps = [s for s, loss in outcome.losses.items() if not loss <= self.bound(case.like, s, without)]
        crash = [outcome.crash[0]] if outcome.crash else []
        return min(steps + crash, default=None)

    def row(self, case: Case, seed: int, outcome: Outcome, healthy: bool) -> Row:
        """What a run came to, as a row. A healthy run's loss is judged by the other seeds of its own case."""
        judged = not healthy or len(self.losses[case.name]) > 2
        shown = (
            self.shown(replace(case, like=case.name if healthy else case.like), outcome, seed if healthy else None)
            if judged
            else None
        )
        first = outcome.findings[0] if outcome.findings else None
        last = max(outcome.losses, default=None)
        return {
            "case": case.name,
            "what": case.what,
            "kind": "healthy" if healthy else "held out" if case in HELD_OUT else "development",
            "seed": seed,
            "steps": self.options.steps,
            "layers": self.options.layers,
            "dim": self.options.dim,
            "threads": torch.get_num_threads(),
            "quick": int(self.options.quick),
            "caught": int(first is not None),
            "caught_step": first.step if first else None,
            "measure": first.measure if first else None,
            "layer": first.layer if first else None,
            "shown": int(shown is not None),
            "shown_step": shown,
            "shown_by": None if shown is None else "exception" if outcome.crash and outcome.crash[0] <= shown else "loss",
            "order": _order(first.step if first else None, shown),
            "val_loss": None if last is None else outcome.losses[last],
            "val_loss_bound": None if last is None else self.bound(case.name if healthy else case.like, last),
            "contribution_max": outcome.figures.get("lora_contribution"),
            "logits_max": outcome.figures.get("lora_logits"),
            "drift_max": outcome.figures.get("lora_drift"),
            "check_ms": outcome.check_ms,
            "step_ms": outcome.step_ms,
        }


def _order(caught: int | None, shown: int | None) -> str:
    """``earlier``: at an earlier step than the loss shows it, or the loss never does; ``same`` step; ``later``; ``missed``."""
    if caught is None:
        return "missed"
    return "earlier" if shown is None or caught < shown else "same" if caught == shown else "later"


def prose() -> tuple[np.ndarray, np.ndarray]:
    """The topics of ``help()`` as bytes: nine tenths for training, one for validation.

    Raises:
        InputError: this Python comes without them.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise InputError("text", "pydoc_data.topics", "a Python that brings its help topics along") from error
    text = np.frombuffer("\n".join(topics[name] for name in sorted(topics)).encode(), dtype=np.uint8)
    cut = len(text) * 9 // 10
    return text[:cut], text[cut:]


def summary_rows(rows: Sequence[Row]) -> list[Row]:
    """A row for each group of runs: how many were found by the check (for healthy ones a false alarm), and when."""
    groups = {name: [row for row in rows if row["kind"] == name] for name in ("development", "held out", "healthy")}
    groups = {"with a mistake": groups["development"] + groups["held out"], **groups}
    return [_group_row(name, own) for name, own in groups.items() if own]


def _group_row(name: str, own: Sequence[Row]) -> Row:
    alarms, runs = sum(row["caught"] for row in own), len(own)
    orders = {order: sum(row["order"] == order for row in own) for order in ("earlier", "same", "later", "missed")}
    conditions = {key: own[0][key] for key in ("steps", "layers", "dim", "threads", "quick")}
    wrong = name != "healthy"  # when a false alarm comes says nothing
    return {
        "group": name,
        **conditions,
        "runs": runs,
        "alarms": alarms,
        "alarm_fraction": alarms / runs,
        **(orders if wrong else dict.fromkeys(orders)),
        "earlier_fraction": orders["earlier"] / runs if wrong else None,
        "shown": sum(row["shown"] for row in own),
        "check_over_step": statistics.median(row["check_ms"] / row["step_ms"] for row in own),
    }


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """The same for people and JSON: by group, what was counted."""
    fixed = ("group", "steps", "layers", "dim", "threads", "quick")
    return {row["group"]: {key: value for key, value in row.items() if key not in fixed} for row in summary_rows(rows)}
