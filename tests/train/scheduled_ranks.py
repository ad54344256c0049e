"""Three gloo ranks, forked after one import of torch: a run whose tasks are scheduled, stopped in the middle and resumed, and a
plain one with the same batches. What each rank saw goes to rankN.json in the folder that is given.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # DDP does: once, before the processes part
import torch.distributed as dist
import torch.multiprocessing as mp

from laneway.cluster.reduce.groups import LevelGroups
from laneway.cluster.reduce.reducer import HierarchicalReducer
from laneway.cluster.reduce.scheme import FLAT, LevelScheme, ReductionScheme
from laneway.cluster.tasks import Decision, Members, Task, TaskScheduler, prefers
from laneway.core import LanewayError
from laneway.rundir import RunDirectory
from laneway.train.config import TrainConfig
from laneway.train.loop import train
from laneway.train.ranks import Ranks
from laneway.train.scheduled import PreparedBatches, ScheduledTasks, aggregation_task
from laneway.train.settings import merge, read_toml

RANKS, STOP = 3, 14
POSITIONS = (("a",), ("a",), ("b",))
SCHEMES = {"flat": FLAT, "levels": ReductionScheme((LevelScheme(), LevelScheme()))}


def prepare(step: int, config: TrainConfig) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 256, (config.batch_size, config.model.context + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class Work:
    """Reduces a vector in every step, counts collectives and ends the run where it is asked to."""

    def __init__(self, reducer: HierarchicalReducer, rank: int, stop: int) -> None:
        self.reducer, self.rank, self.stop = reducer, rank, stop
        self.schemes: list[str] = []
        self.counts: list[int] = []

    def on_step_begin(self, step: int) -> None:
        self.began = dist.group.WORLD._get_sequence_number_for_group()

    def on_backward_end(self, step: int) -> None:
        if step == self.stop:
            raise LanewayError("as asked")
        vector = torch.full((1000,), float(self.rank + step))
        self.reducer.all_reduce(vector)
        assert torch.equal(vector, torch.full((1000,), float(sum(rank + step for rank in range(RANKS)))))
        self.schemes.append("flat" if self.reducer.scheme.flat else "levels")

    def on_step_end(self, step: int, metrics: dict[str, Any]) -> None:
        self.counts.append(dist.group.WORLD._get_sequence_number_for_group() - self.began)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Watched(ScheduledTasks):
    """Writes down what was decided."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.decisions: list[Decision] = []

    def on_step_begin(self, step: int) -> None:
        super().on_step_begin(step)
        assert self.scheduler.decision is not None
        self.decisions.append(self.scheduler.decision)


def scheduled(rank: int, folder: Path, config: TrainConfig, reducer: HierarchicalReducer, stop: int = 0) -> dict[str, Any]:
    members, ran = Members(POSITIONS), []
    ranks = Ranks(rank, rank, RANKS, torch.device("cpu"))

    def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        ran.append(["prepare", step])
        time.sleep(0.02 if rank == 0 else 0.001)  # the first place is the dear one
        return prepare(step, config)

    @prefers(level="L1")
    def kernel(place: Any) -> None:
        ran.append(["kernel", extension.decisions_made()])

    batches = PreparedBatches(batch, prepare(0, config), ranks)
    tasks = [
        aggregation_task(reducer, members, SCHEMES),
        batches.task(members),
        Task("kernel", "kernel", members.groups("L1"), kernel, seconds=0.01, home=2),
        Task("tidy", "checkpoint", members.ones("L2"), lambda place: ran.append(["tidy", extension.decisions_made()]), every=3),
    ]
    scheduler = TaskScheduler(tasks, members, rank=rank, debug=True)
    extension = Counted(scheduler, reducer=reducer, batches=batches, events=RunDirectory(folder / "scheduled").events)
    work = Work(reducer, rank, stop)
    options: dict[str, Any] = {"console": None, "resume": not stop, "extensions": [work, extension]}
    with suppress(LanewayError):
        train(config, out=folder / "scheduled", on_batch=batches.on_batch, **options)
    decisions = [[decision.step, decision.places, decision.reason] for decision in extension.decisions]
    return {"decisions": decisions, "ran": ran, "schemes": work.schemes, "counts": work.counts}


class Counted(Watched):
    """Knows the step that is under way."""

    def decisions_made(self) -> int:
        assert self.scheduler.decision is not None
        return self.scheduler.decision.step


def plain(rank: int, folder: Path, config: TrainConfig) -> None:
    def share(step: int, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = prepare(step, config)
        return inputs.chunk(RANKS)[rank], targets.chunk(RANKS)[rank]

    train(config, out=folder / "plain", console=None, on_batch=share)


def rank_main(rank: int, name: str) -> None:
    folder = Path(name)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    config, problems = merge(TrainConfig(), read_toml(folder / "c.toml"))
    assert not problems
    reducer = HierarchicalReducer(LevelGroups.from_positions(POSITIONS))
    found = {
        "first": scheduled(rank, folder, config, reducer, STOP),
        "resumed": scheduled(rank, folder, config, reducer),
    }
    plain(rank, folder, replace(config, validate_every=0))
    (folder / f"rank{rank}.json").write_text(json.dumps(found), "utf-8")
    reducer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.start_processes(rank_main, args=(sys.argv[1],), nprocs=RANKS, start_method="fork")
