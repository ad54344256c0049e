"""What controls of the streams cost in a training step, beside what the hyper-connections themselves cost.

The plain residual, mHC, and mHC under each control take turns in one process, each a whole step as ``laneway train`` runs it.
``hyper_ms`` is mHC's step less the residual's. A control's ``overhead`` is its step less mHC's, as a fraction of that. A control
that measures every k steps has two kinds of steps, timed apart (``watching`` and between); its cost is the mean over the k.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from laneway.bench.rows import Report, Row
from laneway.bench.threads import using_threads
from laneway.bench.timer import Samples, interleave
from laneway.bench.training import TrainingStep
from laneway.connections.constraint import CurvatureConstraint, Measurement
from laneway.connections.controls import CONTROLS, build
from laneway.core import Extension, InputError, choice, positive_int
from laneway.models.gpt import GPTConfig
from laneway.train.config import TrainConfig
from laneway.train.ranks import ranks_of_run

RESIDUAL, MHC = "residual", "mhc"


@dataclass(frozen=True)
class ControlCostOptions:
    """What is measured."""

    controls: tuple[str, ...] = ("constant", "curvature", "curvature-res")
    dim: int = 256
    layers: int = 2
    context: int = 256
    batch_size: int = 8
    every: int = Measurement().every
    """Steps between two measurements of curvature."""
    sample: int = Measurement().sample
    """Tokens of a measurement."""
    threads: int = 1
    """0 for all."""
    seconds: float = 60.0
    """Time budget of the rounds."""
    quick: bool = False

    def check(self) -> None:
        """Raise InputError for the first field that is out of range."""
        for name in self.controls:
            choice("controls", name, CONTROLS)
        positive_int("threads", self.threads, 0)
        positive_int("every", self.every)
        if not 0 < self.seconds < float("inf"):
            raise InputError("seconds", self.seconds, "a number > 0")
        self.config(MHC).check()

    def config(self, residual: str) -> TrainConfig:
        """The run whose step is measured."""
        model = GPTConfig(residual=residual, dim=self.dim, layers=self.layers, context=self.context)
        return TrainConfig(model=model, batch_size=self.batch_size, parallel="none", device="cpu")


def quick(options: ControlCostOptions) -> ControlCostOptions:
    """At most half a minute on one core: narrow networks and few rounds."""
    return replace(options, dim=min(options.dim, 64), context=min(options.context, 64), seconds=10.0, quick=True)


@dataclass
class ControlledStep:
    """A training step under a control, of one kind: step 1 measures, step 2 doesn't."""

    step: TrainingStep
    control: Extension
    number: int

    def __call__(self) -> None:
        """One step."""
        self.control.on_step_begin(self.number)
        self.step.stepper(self.step.batch, 1e-3, False, lambda: self.control.on_backward_end(self.number))
        self.control.on_step_end(self.number, {"loss": 0.0, "grad_norm": 1.0})
        if self.number == 1:
            self.control.on_step_begin(2)  # the gates that follow from it


def run(options: ControlCostOptions, progress: Callable[[str], None] = lambda line: None) -> Report:
    """Time every variant; raises InputError where an option is out of range."""
    options.check()
    with using_threads(options.threads), ranks_of_run("cpu") as ranks:
        variants: dict[str, Callable[[], None]] = {name: TrainingStep(options.config(name), ranks) for name in (RESIDUAL, MHC)}
        for name in options.controls:
            step = TrainingStep(options.config(MHC), ranks)
            control = build(name, step.model, **_settings(name, options))
            variants[name] = ControlledStep(step, control, 2)
            if isinstance(control, CurvatureConstraint) and options.every > 1:
                variants[f"{name} watching"] = ControlledStep(step, control, 1)
        progress(f"{', '.join(variants)}: about {options.seconds:.0f} s")
        samples = interleave(variants, seconds=options.seconds, min_rounds=3 if options.quick else 9, warmup=2)
    rows = [_row(name, options, samples) for name in (RESIDUAL, MHC, *options.controls)]
    summary = {row["variant"]: row["overhead"] for row in rows if row["overhead"] is not None}
    notes = ["quick: a narrow network, on which a fixed sample weighs more than on any that is trained"] if options.quick else []
    return Report("control-cost", {"control_cost": rows}, {"overhead": summary}, notes)


def _settings(name: str, options: ControlCostOptions) -> dict[str, Any]:
    if name == "constant":
        return {"strength": 0.8}
    strength = {} if name == "curvature-auto" else {"strength": 0.3}
    return strength | {"measurement": Measurement(every=options.every, sample=options.sample)}


def step_ms(name: str, every: int, samples: dict[str, Samples]) -> list[float]:
    """CPU milliseconds of a step in each round, a measuring one spread over ``every`` steps."""
    plain = samples[name].cpu_s
    watching = samples[f"{name} watching"].cpu_s if f"{name} watching" in samples else plain
    return [1000 * (p + (w - p) / every) for p, w in zip(plain, watching, strict=True)]


def _row(name: str, options: ControlCostOptions, samples: dict[str, Samples]) -> Row:
    ms, plain, mhc = (step_ms(which, options.every, samples) for which in (name, RESIDUAL, MHC))
    hyper = statistics.median(m - p for m, p in zip(mhc, plain, strict=True))
    extra = sorted(a - b for a, b in zip(ms, mhc, strict=True))
    controlled = name in options.controls
    return {
        "variant": name,
        "dim": options.dim,
        "layers": options.layers,
        "tokens": options.context * options.batch_size,
        "every": options.every,
        "sample": options.sample,
        "rounds": len(ms),
        "cpu_ms": statistics.median(ms),
        "hyper_ms": hyper,
        "overhead": statistics.median(extra) / hyper if controlled else None,
        "overhead_q1": extra[len(extra) // 4] / hyper if controlled else None,
        "overhead_q3": extra[(3 * len(extra)) // 4] / hyper if controlled else None,
    }
