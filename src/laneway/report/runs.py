"""One run as the report sees it: its files read once, its curves, its final figures."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from laneway.core import InputError
from laneway.report.heatmap import Heat
from laneway.report.memory import Memory, read_memory
from laneway.report.plan import PlanView, read_plan
from laneway.report.series import Curve
from laneway.rundir import RunDirectory, column, number, site_columns

# The figures of the streams: a run that has none of them is a plain residual network, or was never probed.
STREAM_KEYS = ("gain_forward", "gain_backward", "sinkhorn_error", "collapse", "res_entropy")


@dataclass(frozen=True)
class Run:
    """A run directory's contents."""

    path: Path
    name: str
    config: dict[str, Any]
    env: dict[str, Any]
    rows: list[dict[str, Any]]
    events: list[dict[str, Any]]
    memory: Memory | None = None
    memory_fault: str = ""
    """Why there is no ``memory`` although there is a file."""
    plan: PlanView | None = None
    plan_fault: str = ""
    """Why there is no ``plan`` although there is a file."""

    def curve(self, key: str) -> Curve:
        """A scalar over steps."""
        return Curve.of(column(self.rows, key))

    def heat(self, key: str) -> Heat | None:
        """A per-site list over depth and steps; None where the run has none."""
        sites = site_columns(self.rows, key)
        heat = Heat.of(sites) if sites[0] else None
        return heat if heat is not None and heat.drawable else None

    @cached_property
    def has_streams(self) -> bool:
        """Whether any figure of the streams was recorded."""
        return any(self.curve(key).drawable for key in STREAM_KEYS)

    @cached_property
    def final(self) -> Final:
        """The final figures."""
        return Final.of(self)

    @cached_property
    def state(self) -> str:
        """``finished``, ``stopped`` or ``not finished``, after the last event that says so."""
        words = {"finish": "finished", "stop": "stopped", "signal": "stopped", "start": "not finished", "resume": "not finished"}
        return next((words[e["kind"]] for e in reversed(self.events) if e.get("kind") in words), "not finished")

    @cached_property
    def started(self) -> float:
        """Time of day of the first event in seconds, NaN where there is none."""
        return next((t for t in (number(event.get("time")) for event in self.events) if math.isfinite(t)), math.nan)


@dataclass(frozen=True)
class Final:
    """A run's final figures; NaN for what it never recorded."""

    steps: float
    loss: float
    val_loss: float
    val_bits_per_byte: float
    tokens_per_s: float
    seconds: float
    parameters: float
    peak_bytes: float

    @classmethod
    def of(cls, run: Run) -> Final:
        """Last validation (the finish event's, or else the last row's), median rate, highest memory."""
        finish = next((e for e in reversed(run.events) if e.get("kind") == "finish"), {})
        rate, peak = run.curve("tokens_per_s").y, run.curve("peak_bytes").y
        return cls(
            steps=float(run.rows[-1]["step"]) if run.rows else math.nan,
            loss=run.curve("loss").smooth().last(),
            val_loss=_first_finite(finish.get("val_loss"), run.curve("val_loss").last()),
            val_bits_per_byte=_first_finite(finish.get("val_bits_per_byte"), run.curve("val_bits_per_byte").last()),
            tokens_per_s=float(np.nanmedian(rate)) if np.isfinite(rate).any() else math.nan,
            seconds=_first_finite(finish.get("seconds"), _span(run.curve("time").y)),
            parameters=_first_finite(*(event.get("parameters") for event in reversed(run.events)), run.env.get("parameters")),
            peak_bytes=float(np.nanmax(peak)) if np.isfinite(peak).any() else math.nan,
        )

    def as_json(self) -> dict[str, float | None]:
        """The figures with null for what is missing."""
        return {name: value if math.isfinite(value) else None for name, value in vars(self).items()}


def _first_finite(*values: Any) -> float:
    return next((v for v in map(number, values) if math.isfinite(v)), math.nan)


def _span(times: np.ndarray) -> float:
    finite = times[np.isfinite(times)]
    return float(finite[-1] - finite[0]) if len(finite) > 1 else math.nan


def flatten(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted names and values as text, in the order of the file."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def load_runs(paths: Sequence[str | Path]) -> list[Run]:
    """Read the runs, named by their folders; where two folders share a name, by as much of the path as tells them apart.

    Raises:
        InputError: no path, a path that is no run directory, or one given twice.
        LanewayError: a file of a run can't be read.
    """
    if not paths:
        raise InputError("runs", [], "one or more run directories")
    directories = [RunDirectory.open(path, field="runs") for path in paths]
    resolved = [directory.path.resolve() for directory in directories]
    for index, path in enumerate(resolved):
        if path in resolved[:index]:
            raise InputError("runs", str(paths[index]), "each run once")
    return [_load(directory, name) for directory, name in zip(directories, _names(resolved), strict=True)]


def _names(paths: list[Path]) -> list[str]:
    for depth in range(1, 1 + max(len(path.parts) for path in paths)):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _load(directory: RunDirectory, name: str) -> Run:
    memory, fault = read_memory(directory)
    plan, plan_fault = read_plan(directory.plan)
    return Run(
        path=directory.path,
        name=name,
        config=directory.read_config(),
        env=directory.read_env(),
        rows=directory.read_metrics(),
        events=directory.read_events(),
        memory=memory,
        memory_fault=fault,
        plan=plan,
        plan_fault=plan_fault,
    )
