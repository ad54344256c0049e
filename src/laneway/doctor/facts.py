"""A run as the rules see it: columns of its rows, its configuration, and where its first part ends."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from laneway.core import LanewayError
from laneway.rundir import RunDirectory, column, number, site_columns


@dataclass(frozen=True)
class Series:
    """One scalar over steps; NaN where a row has no finite value."""

    steps: np.ndarray
    values: np.ndarray

    def __len__(self) -> int:
        return len(self.steps)

    def finite(self) -> Series:
        """Without the gaps."""
        keep = np.isfinite(self.values)
        return Series(self.steps[keep], self.values[keep])

    def upto(self, step: float) -> Series:
        """The part up to and with ``step``."""
        keep = self.steps <= step
        return Series(self.steps[keep], self.values[keep])

    def after(self, step: float) -> Series:
        """The part after ``step``."""
        keep = self.steps > step
        return Series(self.steps[keep], self.values[keep])

    def blocks(self, count: int) -> Series:
        """Medians over ``count`` equally long stretches (fewer where there are fewer values), without the gaps."""
        finite = self.finite()
        parts = np.array_split(np.arange(len(finite)), max(1, min(count, len(finite))))
        parts = [part for part in parts if len(part)]
        return Series(
            np.array([np.median(finite.steps[part]) for part in parts]),
            np.array([np.median(finite.values[part]) for part in parts]),
        )

    def noise(self) -> float:
        """Standard deviation of a single value about its neighbours, from the median of |differences| (robust)."""
        values = self.finite().values
        return float(np.median(np.abs(np.diff(values))) / (0.6745 * math.sqrt(2))) if len(values) > 1 else 0.0


@dataclass(frozen=True)
class RunFacts:
    """Everything the rules may look at."""

    config: dict[str, Any]
    env: dict[str, Any]
    rows: list[dict[str, Any]]
    events: list[dict[str, Any]]
    others: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    """Rows of the other ranks whose files are there."""

    @classmethod
    def read(cls, path: str | Path) -> RunFacts:
        """From a run directory; InputError where it is none, LanewayError where a file can't be read."""
        run = RunDirectory.open(path)
        try:
            env = run.read_env()
            found = (re.fullmatch(r"rank(\d+)\.jsonl", file.name) for file in run.metrics().parent.glob("rank*.jsonl"))
            others = {int(match[1]): run.read_metrics(int(match[1])) for match in found if match and match[1] != "0"}
            config, rows, events = run.read_config(), run.read_metrics(), run.read_events()
        except OSError as error:
            raise LanewayError(f"{error.filename or run.path}: can't be read ({error.strerror})") from error
        return cls(config, env if isinstance(env, dict) else {}, rows, events, dict(sorted(others.items())))

    def series(self, key: str) -> Series:
        """A scalar over steps."""
        steps, values = column(self.rows, key)
        return Series(np.asarray(steps, dtype=float), np.asarray(values, dtype=float))

    def sites(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps [probes] and values [probes, sites] of a per-site list."""
        steps, values = site_columns(self.rows, key)
        return np.asarray(steps, dtype=float), np.asarray(values, dtype=float).reshape(
            len(steps), len(values[0]) if values else 0
        )

    def setting(self, name: str, default: Any = None) -> Any:
        """A field of the configuration by its dotted name."""
        value: Any = self.config
        for part in name.split("."):
            if not isinstance(value, dict) or part not in value:
                return default
            value = value[part]
        return value

    def now(self, name: str) -> str:
        """`` (now 0.003)`` for a field that the configuration has, else nothing."""
        value = self.setting(name)
        if value is None:
            return ""
        return (
            f" (now {value:g})"
            if isinstance(value, float)
            else f" (now {str(value).lower() if value in (True, False) else value})"
        )

    def scaled(self, name: str, factor: float) -> str:
        """A positive field times ``factor``, as the value of a knob; empty where the configuration has no such number."""
        value = number(self.setting(name))
        return f"{factor * value:.3g}" if value > 0 else ""

    @property
    def residual(self) -> str:
        """The model's residual, empty where the configuration does not say."""
        return str(self.setting("model.residual", ""))

    @property
    def last_step(self) -> float:
        """The last row's step, 0 where there is none."""
        return float(self.rows[-1]["step"]) if self.rows else 0.0

    @property
    def warmup_end(self) -> float:
        """Last step of the warm-up: ``optimizer.warmup`` is a fraction of ``steps``."""
        steps, part = number(self.setting("steps")), number(self.setting("optimizer.warmup"))
        return steps * part if math.isfinite(steps * part) else 0.0

    @property
    def first_part_end(self) -> float:
        """End of what counts as the start: twice the warm-up or a fifth of the planned steps, whichever is later."""
        planned = number(self.setting("steps"))
        planned = planned if math.isfinite(planned) and planned > 0 else self.last_step
        return max(2 * self.warmup_end, 0.2 * planned)

    @property
    def nonfinite(self) -> np.ndarray:
        """Steps with a non-finite loss or gradient, from the rows and the events."""
        steps = {number(event.get("step")) for event in self.events if event.get("kind") == "nonfinite"}
        for key in ("loss", "grad_norm"):
            series = self.series(key)
            steps |= set(series.steps[~np.isfinite(series.values)].tolist())
        return np.array(sorted(step for step in steps if math.isfinite(step)))

    @property
    def largest_peak(self) -> tuple[float, int] | None:
        """Bytes of the largest peak and the rank that had it; None where no rank tells."""
        ranks = {0: self.rows} | self.others
        peaks = [(value, -rank) for rank, rows in ranks.items() for value in column(rows, "peak_bytes")[1] if value == value]
        return (max(peaks)[0], -max(peaks)[1]) if peaks else None

    @property
    def memory_bytes(self) -> float:
        """Memory that the run could use: the accelerator's, or the machine's where it ran on the CPU; NaN if unknown."""
        device = self.env.get("device")
        device = device if isinstance(device, dict) else {}
        on_cpu = device.get("type", "cpu") == "cpu"
        return number(self.env.get("memory_bytes")) if on_cpu else number(device.get("bytes"))
