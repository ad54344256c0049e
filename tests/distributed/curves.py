"""Run by torchrun: trains the same configuration in several ways, one after the other, in one process group.

torchrun --nproc-per-node 2 curves.py CONFIG.toml FOLDER
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from laneway.connections import HyperConnection
from laneway.memory.config import MemoryConfig
from laneway.train import loop, parallel, workbench
from laneway.train.config import TrainConfig
from laneway.train.settings import merge, read_toml

WAYS = {
    "ddp": {"parallel": "ddp"},
    "ddp-accumulating": {"parallel": "ddp", "micro_batch_size": 1},
    "fsdp": {"parallel": "fsdp"},
    "fsdp-accumulating": {"parallel": "fsdp", "micro_batch_size": 1},
    "fsdp-checkpointing": {"parallel": "fsdp", "activation_checkpointing": True},
    "ddp-memory": {"parallel": "ddp", "micro_batch_size": 1, "memory": MemoryConfig("1KiB", min_bytes=256)},
    "fsdp-memory": {"parallel": "fsdp", "micro_batch_size": 1, "memory": MemoryConfig("1KiB", min_bytes=256)},
    "ddp-bf16": {"parallel": "ddp", "precision": "bf16"},
    "fsdp-bf16": {"parallel": "fsdp", "precision": "bf16"},
}

MANAGED = ("ddp-memory", "fsdp-memory")


class Facts:
    """What a way did inside: the dtypes it computed in, and under DDP how many gradient buckets it reduced."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def watch(self, model: torch.nn.Module) -> None:
        """Note the dtypes that the first site and the first sub-layer really compute in."""
        site = next(module for module in model.modules() if isinstance(module, HyperConnection))
        ffn = next(module for module in model.modules() if type(module).__name__ == "SwiGLU")
        site.register_forward_hook(
            lambda module, args, _: self.seen.update(maps=str(module.fn.dtype), streams=str(args[0].dtype))
        )
        ffn.register_forward_hook(lambda module, _, output: self.seen.update(ffn=str(output.dtype)))

    def count(self, ddp: DistributedDataParallel) -> None:
        """Count the buckets that DDP reduces."""
        self.seen["buckets"] = 0

        def hook(group, bucket):  # DDP reads annotations as types, so none as text
            self.seen["buckets"] += 1
            return default_hooks.allreduce_hook(group, bucket)

        ddp.register_comm_hook(None, hook)


def main() -> None:
    """Train in every way and leave ``facts.json``."""
    torch.set_num_threads(1)
    folder = Path(sys.argv[2])
    config, problems = merge(TrainConfig(), read_toml(sys.argv[1]))
    assert not problems
    dist.init_process_group("gloo")
    original, all_facts = parallel.parallelise, {}
    for name, changes in WAYS.items():
        facts = Facts()

        def watched(model, *args, facts=facts, name=name):
            made = original(model, *args)
            facts.watch(made.model)
            if made.kind == "ddp" and name not in MANAGED:
                facts.count(made.call)
            return made

        workbench.parallelise = watched
        loop.train(dataclasses.replace(config, **changes), out=folder / name, console=None)
        all_facts[name] = facts.seen
    assert dist.is_initialized()  # train() used our group and left it to us
    if dist.get_rank() == 0:
        (folder / "facts.json").write_text(json.dumps(all_facts))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
