"""Two gloo ranks: gradients purified in shards and as a whole, and runs with and without controls whose collectives are counted.

control_ranks.py FOLDER: what each rank found goes to rankN.json.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # DDP does: once, before the processes part
import torch.distributed as dist
import torch.multiprocessing as mp
from built import shown
from scheduler_ranks import all_runs
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from laneway.bench.control_ranks import SETTINGS, ControlRanksOptions, Run
from laneway.connections import shard_connections
from laneway.connections.guard import PathNormGuard
from laneway.connections.purify import GradientPurifier
from laneway.connections.readings import read
from laneway.models.gpt import GPT, GPTConfig
from laneway.rundir import RunDirectory
from laneway.train.config import TrainConfig
from laneway.train.loop import train
from laneway.train.ranks import Ranks
from laneway.train.settings import merge, read_toml

RANKS = 2
FAULT = range(9, 12)


def collectives() -> int:
    return dist.group.WORLD._get_sequence_number_for_group()


def spoil(model: torch.nn.Module, step: int) -> None:
    if step in FAULT:
        model.blocks[1].ffn.out.weight.grad.mul_(1e6)


def in_shards() -> dict[str, Any]:
    """The same gradients in a sharded model and in a whole one: readings, decisions and corrections of both."""
    torch.manual_seed(1)
    whole = GPT(GPTConfig(vocab_size=32, context=16, layers=4, heads=2, dim=8, streams=3))
    sharded = copy.deepcopy(whole)
    mesh = init_device_mesh("cpu", (RANKS,))
    shard_connections(sharded, mesh)
    for block in sharded.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    found: dict[str, Any] = {}
    for kind, make in {
        "purifier": lambda m: GradientPurifier(m, 2, sample=64),
        "guard": lambda m: PathNormGuard(m, 50.0, warmup=6),
    }.items():
        models, controls = (whole, sharded), [make(whole), make(sharded)]
        rows: list[Any] = []
        difference = quantiles = 0.0
        for step in range(1, 13):
            tokens = torch.randint(0, 32, (2, 16), generator=torch.Generator().manual_seed(step))
            counts = []
            for model, control in zip(models, controls, strict=True):
                model.zero_grad()
                model(tokens).logsumexp(-1).mean().backward()
                spoil(model, step)
                before = collectives()
                control.on_step_begin(step)
                control.on_backward_end(step)
                counts.append(collectives() - before)
                row: dict[str, Any] = {}
                control.on_step_end(step, row)
                counts.append(row["purified_paths"])
            rows.append(counts)
            for a, b in zip(whole.parameters(), sharded.parameters(), strict=True):
                full = b.grad.full_tensor()
                difference = max(difference, float((a.grad - full).norm() / a.grad.norm().clamp_min(1e-12)))
            if kind == "purifier":
                here, there = (read(control.gradients, 64)[0].quantiles for control in controls)
                quantiles = max(quantiles, float(np.nan_to_num(np.abs(here - there)).max()))
                assert (np.isnan(here) == np.isnan(there)).all()
        found[kind] = {"rows": rows, "difference": difference, "quantiles": quantiles}
    return found


class Fault:
    """The same fault in a run; counts what a step takes."""

    def __init__(self) -> None:
        self.model: Any = None
        self.counts: list[int] = []
        self.began = 0

    def attach(self, model: torch.nn.Module) -> None:
        self.model = model

    def on_step_begin(self, step: int) -> None:
        self.began = collectives()

    def on_backward_end(self, step: int) -> None:
        spoil(self.model, step)

    def on_step_end(self, step: int, metrics: dict[str, Any]) -> None:
        self.counts.append(collectives() - self.began)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def run(folder: Path, kind: str, name: str, control: dict[str, Any]) -> dict[str, Any]:
    config, problems = merge(TrainConfig(), read_toml(folder / "c.toml") | {"parallel": kind, "control": control})
    assert not problems
    fault = Fault()
    with shown(fault.attach):
        train(config, out=folder / name, console=None, extensions=[fault])
    rows = [row for row in RunDirectory(folder / name).read_metrics() if "loss" in row]
    return {"counts": fault.counts, "purified": [row.get("purified_paths") for row in rows]}


def counted(rank: int) -> dict[str, Any]:
    """Collectives of each step under settings of the benchmark that have every control, and of DDP's own passes beside them."""
    options = ControlRanksOptions(ranks=RANKS, dim=8, layers=2, batch=1, context=8)
    ranks = Ranks(rank, rank, RANKS, torch.device("cpu"))
    tokens = torch.randint(0, 256, (1, 9), generator=torch.Generator().manual_seed(rank))
    found: dict[str, Any] = {}
    for name in ("off", "guard", "purify", "all"):
        run, counts = Run(options, ranks, SETTINGS[name]), []

        def own(run: Run = run) -> None:
            run.parallel.call(tokens[:, :-1]).logsumexp(-1).mean().backward()
            run.parallel.call.zero_grad()

        for _ in range(2):  # in the second one DDP arranges its buckets anew
            own()
        for number in range(1, 7):  # with a measurement, and a check
            begun = collectives()
            own()
            between = collectives()
            run.step(number, (tokens[:, :-1], tokens[:, 1:]))
            counts.append([between - begun, collectives() - between])
        found[name] = counts
    return found


def rank_main(rank: int, name: str) -> None:
    folder = Path(name)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    control = {"purify_every": 2, "purify_sample": 64, "verify_ranks": True}
    found = {
        "shards": in_shards(),
        "counted": counted(rank),
        "ddp off": run(folder, "ddp", "a", {}),
        "ddp now": run(folder, "ddp", "b", control),
        "fsdp off": run(folder, "fsdp", "c", {}),
        "fsdp late": run(folder, "fsdp", "d", control | {"purify_screen": "late"}),
        "scheduler": all_runs(folder),
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(found), "utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.start_processes(rank_main, args=(sys.argv[1],), nprocs=RANKS, start_method="fork")
