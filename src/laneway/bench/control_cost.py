"""What controls of the streams cost, beside what the hyper-connections themselves cost.

A chain of sites, forward and backward, around sub-layers that only halve what they read: the streams' part of a training step and
nothing else. The plain residual, mHC, and mHC under each control take turns in one process. ``hyper_ms`` is mHC's time less the
residual's; a control's ``overhead`` is its time less mHC's, as a fraction of that. A control that measures every k steps has two
kinds of steps, timed apart (``watching`` and between); its time is the mean over the k. ``again`` is mHC a second time: what its
overhead differs from zero by, no such measurement can tell. What curvature may cost is ``TARGET``.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from laneway.bench.rows import Report, Row
from laneway.bench.threads import using_threads
from laneway.bench.timer import Samples, interleave
from laneway.connections import HyperConnection, StreamChain
from laneway.connections.constraint import CurvatureConstraint, Measurement
from laneway.connections.controls import CONTROLS, build
from laneway.connections.scheduler import ConnectionScheduler
from laneway.core import Extension, InputError, choices, positive_int

RESIDUAL, MHC, AGAIN = "residual", "mhc", "again"
TARGET = 0.05


@dataclass(frozen=True)
class ControlCostOptions:
    """What is measured."""

    controls: tuple[str, ...] = ("constant", "curvature", "curvature-res", "priorities", "scheduler")
    dim: int = 256
    streams: int = 4
    sites: int = 8
    tokens: int = 2048
    """Of a batch."""
    every: int = Measurement().every
    """Steps between two measurements of curvature, or of the scheduler."""
    sample: int = Measurement().sample
    """Tokens of a measurement."""
    threads: int = 1
    """0 for all."""
    seconds: float = 60.0
    """Time budget of the rounds."""
    quick: bool = False

    def check(self) -> None:
        """Raise InputError for the first field that is out of range."""
        choices("controls", self.controls, CONTROLS)
        for name in ("dim", "sites", "tokens", "every"):
            positive_int(name, getattr(self, name))
        positive_int("streams", self.streams, 2)
        positive_int("threads", self.threads, 0)
        if not 0 < self.seconds < float("inf"):
            raise InputError("seconds", self.seconds, "a number > 0")


def quick(options: ControlCostOptions) -> ControlCostOptions:
    """At most half a minute on one core: few sites and few rounds."""
    return replace(options, sites=min(options.sites, 4), tokens=min(options.tokens, 1024), seconds=8.0, quick=True)


class SiteStep:
    """Forward and backward of a chain of sites."""

    def __init__(self, options: ControlCostOptions, streams: int) -> None:
        self.sites = nn.ModuleList(HyperConnection(options.dim, streams, site=place) for place in range(options.sites))
        self.x = torch.randn(options.tokens, streams, options.dim, requires_grad=True)

    def __call__(self) -> None:
        """One pass; the gradients are let go."""
        chain = StreamChain(self.x)
        for site in self.sites:
            assert isinstance(site, HyperConnection)
            chain.leave(chain.enter(site) * 0.5)
        chain.streams().sum().backward()  # the scheduler reads what autograd leaves at its meters
        self.x.grad = None
        self.sites.zero_grad()


@dataclass
class ControlledStep:
    """The same under a control, in a step that measures (step 1) or doesn't (step 2)."""

    step: SiteStep
    control: Extension
    number: int

    def __call__(self) -> None:
        """One step."""
        self.control.on_step_begin(self.number)
        self.step()
        self.control.on_backward_end(self.number)
        self.control.on_step_end(self.number, {"loss": 0.0, "grad_norm": 1.0})
        if self.number == 1:
            self.control.on_step_begin(2)  # the gates that follow from it


def run(options: ControlCostOptions, progress: Callable[[str], None] = lambda line: None) -> Report:
    """Time every variant; raises InputError where an option is out of range."""
    options.check()
    with using_threads(options.threads):
        torch.manual_seed(0)
        variants: dict[str, Callable[[], None]] = {RESIDUAL: SiteStep(options, 1)}
        variants |= {name: SiteStep(options, options.streams) for name in (MHC, AGAIN)}
        for name in options.controls:
            step = SiteStep(options, options.streams)
            control = build(name, step.sites, **_settings(name, options))
            variants[name] = ControlledStep(step, control, 2)
            if isinstance(control, CurvatureConstraint | ConnectionScheduler):
                variants[f"{name} watching"] = ControlledStep(step, control, 1)
        progress(f"{', '.join(variants)}: about {options.seconds:.0f} s")
        samples = interleave(variants, seconds=options.seconds, min_rounds=5, max_rounds=1000, warmup=3)
    rows = [_row(name, options, samples) for name in (RESIDUAL, MHC, AGAIN, *options.controls)]
    summary = {row["variant"]: row["overhead"] for row in rows if row["variant"] in options.controls}
    notes = ["quick: few tokens, over which a fixed sample weighs more than in a run"] if options.quick else []
    return Report("control-cost", {"control_cost": rows}, {"overhead": summary}, notes)


def _settings(name: str, options: ControlCostOptions) -> dict[str, Any]:
    if name == "constant":
        return {"strength": 0.8}
    if name == "priorities":
        return {"shares": (2.0, *[1.0] * (options.streams - 1))}
    if name.startswith("scheduler"):
        return {"every": options.every, "sample": options.sample}
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
    controlled = name not in (RESIDUAL, MHC)
    return {
        "variant": name,
        "dim": options.dim,
        "streams": options.streams,
        "sites": options.sites,
        "tokens": options.tokens,
        "every": options.every,
        "sample": options.sample,
        "rounds": len(ms),
        "cpu_ms": statistics.median(ms),
        "hyper_ms": hyper,
        "overhead": statistics.median(extra) / hyper if controlled else None,
        "overhead_q1": extra[len(extra) // 4] / hyper if controlled else None,
        "overhead_q3": extra[(3 * len(extra)) // 4] / hyper if controlled else None,
        **judged(TARGET if name.startswith("curvature") else None, statistics.median(extra) / hyper),
    }


def judged(target: float | None, found: float) -> Row:
    """Columns of a row: the most that may be spent, and whether it is kept to (yes, no); empty without a target."""
    return {"target": target, "met": None if target is None else "yes" if found <= target else "no"}
