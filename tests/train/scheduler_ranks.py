"""Runs with the scheduler of streams over this process group, gradients accumulated: what it decided, step by step."""

from __future__ import annotations

import hashlib
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from built import shown
from torch import Tensor

from laneway.connections.schedule import schedulers
from laneway.core import LanewayError
from laneway.rundir import RunDirectory
from laneway.train.config import TrainConfig
from laneway.train.loop import train
from laneway.train.settings import merge, read_toml

STEPS, SAVED, STOP = 6, 3, 5
DECIDED = ("demand", "similarity", "damping")


class Decisions:
    """Notes the schedulers' buffers as a step begins to use them, and ends the run where it is asked to."""

    def __init__(self, stop: int = 0) -> None:
        self.stop, self.hashes, self.last = stop, [], {}
        self.model: torch.nn.Module | None = None

    def attach(self, model: torch.nn.Module) -> None:
        self.model = model

    def on_step_begin(self, step: int) -> None:
        if step == self.stop:
            raise LanewayError("as if killed")

    def on_backward_end(self, step: int) -> None:
        sites = schedulers(self.model)
        self.last: dict[str, Tensor] = {name: torch.stack([getattr(site, name) for site in sites]) for name in DECIDED}
        self.hashes.append(hashlib.sha256(b"".join(t.numpy().tobytes() for t in self.last.values())).hexdigest())

    def on_step_end(self, step: int, metrics: dict[str, Any]) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def run(folder: Path, kind: str, name: str, damping: float = 0.5, stop: int = 0, resume: bool = False) -> dict[str, Any]:
    """One run of ``STEPS`` steps whose micro-batches are single sequences; its losses, priorities and decisions."""
    control = {"scheduler": True, "scheduler_every": 2, "scheduler_damping": damping, "scheduler_temperature": 0.5}
    fields = {"parallel": kind, "control": control, "steps": STEPS, "checkpoint_every": SAVED, "micro_batch_size": 1}
    given = read_toml(folder / "c.toml")
    config, problems = merge(TrainConfig(), given | fields | {"model": given["model"] | {"layers": 1}})
    assert not problems
    decisions = Decisions(stop)
    with shown(decisions.attach), suppress(LanewayError) if stop else nullcontext():
        train(config, out=folder / name, console=None, extensions=[decisions], resume=resume)
    rows = [row for row in RunDirectory(folder / name).read_metrics() if "loss" in row]
    keys = ("loss", "grad_norm", "priority", "read_priority", "similarity")
    buffers = {name: values.tolist() for name, values in decisions.last.items()}
    return {"rows": [[row.get(key) for key in keys] for row in rows], "hashes": decisions.hashes, "last": buffers}


def all_runs(folder: Path) -> dict[str, Any]:
    """Over two kinds of ranks, without damping, and resumed in the middle."""
    found = {kind: run(folder, kind, f"scheduled {kind}") for kind in ("ddp", "fsdp")}
    found["parts"] = {"hashes": run(folder, "fsdp", "parts", stop=STOP)["hashes"]}
    return found | {
        "resumed": run(folder, "fsdp", "parts", resume=True),
        "undamped": run(folder, "ddp", "undamped", damping=0.0),
    }
