"""Run by torchrun: trains sharded while one rank alone can't write for some steps.

torchrun --nproc-per-node 2 full_disk.py CONFIG.toml FOLDER
"""

from __future__ import annotations

import os
import resource
import sys
from typing import Any

from laneway.train.config import TrainConfig
from laneway.train.loop import train
from laneway.train.settings import merge, read_toml


class Full:
    """No file of rank 1 may grow from step 5 until step 8."""

    def __init__(self) -> None:
        self.hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]

    def on_step_begin(self, step: int) -> None:
        if os.environ["RANK"] == "1" and step in (5, 8):
            resource.setrlimit(resource.RLIMIT_FSIZE, (0 if step == 5 else self.hard, self.hard))

    def on_backward_end(self, step: int) -> None: ...

    def on_step_end(self, step: int, metrics: dict[str, Any]) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


if __name__ == "__main__":
    config, problems = merge(TrainConfig(), read_toml(sys.argv[1]))
    assert not problems
    train(config, out=sys.argv[2], extensions=[Full()], console=None)
