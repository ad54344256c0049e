"""Makes run directories as the training loop writes them, through the run directory's own functions."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from laneway.rundir import RunDirectory, append_row

BEGIN = 1_760_000_000.0


def rows(
    steps: int = 400,
    seed: int = 0,
    sites: int = 8,
    streams: bool = True,
    growth: float = 0.0,
    floor: float = 1.25,
    log_every: int = 1,
) -> list[dict[str, Any]]:
    """Metrics rows of a healthy run: a power law with noise, warm-up and cosine, a probe every 20 steps.

    ``growth``: by how much a site multiplies the gain at the end (0: mHC-like, 0.6: HC-like).
    """
    random = np.random.default_rng(seed)
    found = []
    for step in range(1, steps + 1):
        if step % log_every and step != steps:
            continue
        loss = floor + (5.5 - floor) * (1 + step / 12) ** -0.75 + random.normal(0, 0.035)
        part = step / steps
        lr = 3e-3 * (step / (0.05 * steps) if part < 0.05 else 0.1 + 0.45 * (1 + math.cos(math.pi * (part - 0.05) / 0.95)))
        rate = 41_000 * random.lognormal(0, 0.04)
        row = {
            "step": step,
            "time": BEGIN + 0.2 * step,
            "loss": loss,
            "bits_per_byte": loss / math.log(2),
            "lr": lr,
            "grad_norm": float(0.4 + 2.5 * math.exp(-step / 30) + random.gamma(4, 0.02)),
            "tokens_per_s": rate,
            "step_ms": 8192 / rate * 1000,
            "peak_bytes": int(6.1e8 + 4e7 * (1 - math.exp(-step / 5))),
        }
        if streams and (step % 20 == 0 or step == 1):
            row |= probe(step / steps, sites, growth, random)
        if step % 100 == 0 or step == steps:
            row |= {"val_loss": loss + 0.05, "val_bits_per_byte": (loss + 0.05) / math.log(2)}
        found.append(row)
    return found


def probe(part: float, sites: int, growth: float, random: np.random.Generator) -> dict[str, Any]:
    """What ``StreamProbe.summary()`` gives."""
    depth = np.arange(1, sites + 1)
    forward = (1 + growth * part) ** depth * (1 + 0.01 * part * depth) + 0.002 * random.random(sites)
    backward = (1 + growth * part) ** depth[::-1] + 1e-4 * random.random(sites)
    collapse = 1 - (0.25 * part * np.sqrt(depth / sites) + 0.01) * (1 + 0.05 * random.random(sites))
    error, entropy = 1e-3 * part * (1 + random.random(sites)) + 1e-6, 0.01 + 0.3 * part * random.random(sites)
    lists = {"gain_forward": forward, "gain_backward": backward, "collapse": collapse}
    lists |= {"sinkhorn_error": error, "res_entropy": entropy}
    scalars = {
        name: float(values.max() if "gain" in name or "error" in name else values.mean()) for name, values in lists.items()
    }
    return scalars | {f"site_{name}": values.tolist() for name, values in lists.items()}


def config(steps: int = 400, residual: str = "mhc", lr: float = 3e-3) -> str:
    """A complete-looking config.toml."""
    return f"""steps = {steps}
batch_size = 32
precision = "fp32"
sample_prompt = "def "

[model]
vocab_size = 256
context = 256
layers = 4
dim = 128
residual = "{residual}"
streams = 4

[data]
path = "stdlib"

[optimizer]
lr = {lr}
warmup = 0.05
clip_norm = 1.0
"""


def make_run(
    path: Path,
    metrics: list[dict[str, Any]] | None = None,
    toml: str | None = None,
    sample: str = "read(self, size=-1):\n    return self._buffer.read(size)\n",
    finished: bool = True,
) -> RunDirectory:
    """A run directory with everything the loop writes, except checkpoints."""
    path.mkdir(parents=True)
    run = RunDirectory(path)
    metrics = rows() if metrics is None else metrics
    run.config.write_text(config() if toml is None else toml, "utf-8")
    machine = {"laneway": "0.1.0", "torch": "2.13.0+cpu", "cpu": "A processor", "cores": 2, "memory_bytes": 24 << 30}
    run.env.write_text(
        json.dumps(machine | {"device": {"type": "cpu"}, "parameters": 1_053_456, "command": "laneway train"}), "utf-8"
    )
    for row in metrics:
        append_row(run.metrics(), row)
    add_event(run, "start", 0, world_size=1)
    last = metrics[-1]["step"] if metrics else 0
    for step in range(100, min(last, 10_000) + 1, 100):
        add_event(run, "checkpoint", step, seconds=0.12)
        add_event(run, "sample", step, prompt="def ", text=sample)
    if finished and metrics:
        ends = {key: metrics[-1].get(key) for key in ("val_loss", "val_bits_per_byte")}
        add_event(run, "finish", last, **ends, seconds=0.2 * last)
    return run


def add_event(run: RunDirectory, kind: str, step: int, **fields: Any) -> None:
    """An event at the time that the step had (``append_event`` takes the clock's)."""
    append_row(run.events, {"time": BEGIN + 0.2 * step, "step": step, "kind": kind, **fields})
