"""Runs for the doctor: healthy ones with realistic noise, and one with each symptom."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from laneway.doctor import RunFacts


@dataclass
class Run:
    """A synthetic run that tests change before they ask for its facts."""

    config: dict[str, Any]
    rows: list[dict[str, Any]]
    events: list[dict[str, Any]] = field(default_factory=list)
    env: dict[str, Any] = field(default_factory=lambda: {"memory_bytes": 16 << 30, "device": {"type": "cpu"}})

    @property
    def facts(self) -> RunFacts:
        return RunFacts(self.config, self.env, self.rows, self.events)

    def column(self, key: str, values) -> None:
        for row, value in zip(self.rows, values, strict=True):
            row[key] = value

    def at(self, part: float) -> int:
        """Index of the row at a fraction of the run."""
        return int(part * (len(self.rows) - 1))


def config(steps: int, residual: str = "mhc", lr: float = 3e-3, warmup: float = 0.05) -> dict[str, Any]:
    return {
        "steps": steps,
        "precision": "fp32",
        "probe_every": 20,
        "model": {"vocab_size": 256, "residual": residual, "streams": 4, "logit_cap": 8.0, "sinkhorn_iterations": 20},
        "optimizer": {"lr": lr, "warmup": warmup, "clip_norm": 1.0, "weight_decay": 0.1, "beta2": 0.95},
        "data": {"path": "stdlib"},
    }


def healthy(
    seed: int = 0,
    steps: int = 600,
    noise: float = 0.05,
    residual: str = "mhc",
    log_every: int = 1,
    exponent: float = 0.6,
    floor: float = 1.3,
    spikes: float = 0.002,
) -> Run:
    """Loss: a power law with correlated and heavy-tailed noise and a rare single spike, as small batches have.

    Gradient norms are lognormal, speed drifts and stutters, the peak of the memory settles in the first steps.
    """
    random = np.random.default_rng(seed)
    run = Run(config(steps, residual), [])
    slow = speed = 0.0
    peak = 5.0e8
    for step in range(1, steps + 1):
        slow, speed = 0.9 * slow + random.normal(0, 0.2 * noise), 0.95 * speed + random.normal(0, 0.02)
        peak += random.exponential(2e7) * (step < 20) + random.exponential(3e6) * (random.random() < 0.01)
        if step % log_every and step not in (1, steps):
            continue
        warm = min(1.0, step / (0.05 * steps))
        clean = floor + (math.log(256) - floor) * (1 + warm * step / 10) ** -exponent
        spike = random.exponential(1.0) * (random.random() < spikes)
        loss = clean + slow + noise * random.standard_t(5) + spike
        run.rows.append({"step": step, "loss": loss} | _step(random, step, steps, speed, peak))
        if residual != "residual" and (step % 20 == 0 or step == 1):
            run.rows[-1] |= _probe(random, step / steps, residual)
        if step % max(log_every, steps // 6) == 0 or step == steps:
            run.rows[-1]["val_loss"] = clean + slow + 0.04 + random.normal(0, 0.2 * noise)
    return run


def _step(random: np.random.Generator, step: int, steps: int, speed: float, peak: float) -> dict[str, Any]:
    part = step / steps
    stutter = 0.3 if random.random() < 0.02 else 1.0
    return {
        "lr": 3e-3 * (part / 0.05 if part < 0.05 else 0.1 + 0.45 * (1 + math.cos(math.pi * (part - 0.05) / 0.95))),
        "grad_norm": (0.4 + 2 * math.exp(-step / 25)) * random.lognormal(0, 0.35),
        "tokens_per_s": 40_000 * math.exp(speed) * stutter * (0.5 if step < 5 else 1.0),
        "peak_bytes": int(peak),
    }


def _probe(random: np.random.Generator, part: float, residual: str) -> dict[str, Any]:
    collapse = 1 - (0.002 + 0.15 * part * random.uniform(0.8, 1.2, 8))
    entropy = 0.048 + 0.4 * min(1.0, 10 * part) * random.uniform(0.1, 1.0, 8)
    return {
        "gain_forward": 1 + abs(random.normal(0, 0.05)),
        "gain_backward": 1.1 + abs(random.normal(0, 0.2)),
        "sinkhorn_error": 0.04 + 0.02 * random.random()
        if residual == "mhc"
        else 2.0
        if residual in ("hc", "orthogonal")
        else 1e-6,
        "collapse": float(collapse.mean()),
        "res_entropy": float(entropy.mean()),
        "site_gain_forward": [1.0] * 8,
        "site_gain_backward": [1.1] * 8,
        "site_collapse": collapse.tolist(),
        "site_res_entropy": entropy.tolist(),
    }
