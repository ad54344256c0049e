"""Run by torchrun: trains the same configuration with gradients over levels in several ways; every two ranks say that they are a
host of their own.

torchrun --nproc-per-node 4 levels_curves.py CONFIG.toml FOLDER [WAY --resume]
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from laneway.train import loop
from laneway.train.config import TrainConfig
from laneway.train.reduction import RunReduction
from laneway.train.reduction_config import ReductionConfig
from laneway.train.settings import merge, read_toml

LEVELS = ReductionConfig(over="levels", chunk_bytes=4096)
DROPPING = dataclasses.replace(LEVELS, drop=0.5, wire="bf16")
HOSTS = dataclasses.replace(LEVELS, shard="hosts", topology="2xCPU_2nodes")
WAYS = {
    "ddp": {"parallel": "ddp", "reduction": LEVELS},
    "ddp-dropping": {"parallel": "ddp", "reduction": DROPPING},
    "ddp-auto": {"parallel": "ddp", "reduction": ReductionConfig(over="auto")},
    "fsdp": {"parallel": "fsdp", "reduction": LEVELS, "micro_batch_size": 1},
    "fsdp-hosts": {"parallel": "fsdp", "reduction": HOSTS, "micro_batch_size": 1},
}


def main() -> None:
    """Train in every way, or go on in one; leave what the ranks had not sent in ``residuals.json``."""
    torch.set_num_threads(1)
    folder, only = Path(sys.argv[2]), sys.argv[3:]
    os.environ["NCCL_HOSTID"] = f"host{int(os.environ['RANK']) // 2}"
    config, problems = merge(TrainConfig(), read_toml(sys.argv[1]))
    assert not problems
    dist.init_process_group("gloo")
    loaded: dict[str, float] = {}
    load = RunReduction.load_state_dict

    def told(self: RunReduction, *states) -> None:
        load(self, *states)
        if self.dropper is not None:
            total = torch.tensor(sum(float(run.double().sum()) for _, run in self.dropper.residuals()), dtype=torch.float64)
            dist.all_reduce(total)
            loaded["sum"] = float(total)

    RunReduction.load_state_dict = told  # type: ignore[method-assign]
    for name in only[:1] or WAYS:
        loop.train(dataclasses.replace(config, **WAYS[name]), out=folder / name, resume=bool(only), console=None)
    if dist.get_rank() == 0:
        (folder / "residuals.json").write_text(json.dumps(loaded))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
