"""What ranks of a training run do whose network changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from laneway.bench.netlab import Context
from laneway.train.config import TrainConfig
from laneway.train.loop import train
from laneway.train.settings import merge, read_toml


class Slow:
    """The uplink of a rack is slow from one step on, and well again from another."""

    def __init__(self, context: Context, steps: tuple[int, int], mbit: float) -> None:
        self.context, self.steps, self.mbit = context, steps, mbit

    def on_step_begin(self, step: int) -> None:
        if self.context.rank == 0 and step in self.steps:
            self.context.set_rate("rack1", self.mbit if step == self.steps[0] else self.context.network.rack_mbit)

    def on_backward_end(self, step: int) -> None:
        pass

    def on_step_end(self, step: int, metrics: dict[str, Any]) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def trains(context: Context, folder: str, steps: tuple[int, int], mbit: float) -> None:
    """Train what ``config.toml`` says in ``folder``."""
    torch.set_num_threads(1)
    context.start_gloo()
    config, problems = merge(TrainConfig(), read_toml(Path(folder, "config.toml")))
    assert not problems
    train(config, out=Path(folder, "run"), extensions=[Slow(context, steps, mbit)], console=None)
    dist.destroy_process_group()
