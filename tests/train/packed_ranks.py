"""Two gloo ranks, forked after one import of torch: shared statistics of given layouts, and runs whose collectives are counted.

packed_ranks.py FOLDER: layouts.json in it has a list of steps for each layout; what each rank found goes to rankN.json.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # DDP does: once, before the processes part
import torch.distributed as dist
import torch.multiprocessing as mp

from laneway.core import LanewayError
from laneway.train.config import TrainConfig
from laneway.train.loop import train
from laneway.train.packed import SharedStatistics
from laneway.train.settings import merge, read_toml

RANKS = 2
Layout = dict[str, tuple[int, str]]


def collectives() -> int:
    """How many this process has begun on the group of all ranks, those of DDP's own code included."""
    return dist.group.WORLD._get_sequence_number_for_group()


class Watcher:
    """An extension that shares its rank's numbers and counts what each step costs."""

    def __init__(self, rank: int, sizes: Layout, crash_at: int) -> None:
        self.rank, self.sizes, self.crash_at = rank, sizes, crash_at
        self.found: list[dict[str, Any]] = []
        self.counts: list[int] = []
        self.began = 0

    def share(self, statistics: Any) -> None:
        self.statistics = statistics
        for name, (size, op) in self.sizes.items():
            statistics.add(name, size, op)

    def on_step_begin(self, step: int) -> None:
        values = {name: self.statistics.get(name) for name in self.sizes}
        self.found.append({name: None if value is None else value.tolist() for name, value in values.items()})
        self.began = collectives()

    def on_backward_end(self, step: int) -> None:
        if step == self.crash_at:
            raise LanewayError("as asked")
        for name, (size, _) in self.sizes.items():
            self.statistics.put(name, [float(10 * step + self.rank)] * size)

    def on_step_end(self, step: int, metrics: dict[str, Any]) -> None:
        self.counts.append(collectives() - self.began)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def reduce_all(rank: int, layouts: list[dict[str, Any]]) -> list[Any]:
    """For each layout and step what came back, and how many collectives it took."""
    results = []
    for layout in layouts:
        shared = SharedStatistics("cpu", rank, RANKS)
        for name, (size, op) in layout["entries"].items():
            shared.add(name, size, op)
        shared.seal()
        for given in layout["steps"]:
            before = collectives()
            for name, values in given[rank].items():
                shared.put(name, values)
            shared.start()
            shared.finish()
            found = {name: shared.taken(name).tolist() for name in layout["entries"]}
            results.append([collectives() - before, found])
    return results


def disagreement(rank: int) -> str:
    shared = SharedStatistics("cpu", rank, RANKS)
    shared.add("load", 2 if rank == 1 else 3)
    try:
        shared.seal()
    except LanewayError as error:
        return str(error)
    return ""


def run(rank: int, folder: Path, kind: str, extra: Layout, crash_at: int = 0, resume: bool = False) -> dict[str, Any]:
    """What a run's extension saw: counts of collectives, and what it had shared."""
    config, problems = merge(TrainConfig(), read_toml(folder / "c.toml") | {"parallel": kind})
    assert not problems
    watcher = Watcher(rank, extra, crash_at)
    with suppress(LanewayError):
        train(config, out=folder / f"{kind}{len(extra)}", console=None, resume=resume, extensions=[watcher])
    return {"counts": watcher.counts, "found": watcher.found}


def rank_main(rank: int, name: str) -> None:
    folder = Path(name)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    extra: Layout = {"a": (2, "sum"), "b": (1, "max"), "c": (2, "gather")}
    found = {
        "layouts": reduce_all(rank, json.loads((folder / "layouts.json").read_text("utf-8"))),
        "disagreement": disagreement(rank),
        "ddp": run(rank, folder, "ddp", {}),
        "ddp shared": run(rank, folder, "ddp", extra, crash_at=4),
        "ddp resumed": run(rank, folder, "ddp", extra, resume=True),
        "fsdp": run(rank, folder, "fsdp", {}),
        "fsdp shared": run(rank, folder, "fsdp", extra),
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(found), "utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.start_processes(rank_main, args=(sys.argv[1],), nprocs=RANKS, start_method="fork")
