"""The memory manager in a run: made where the configuration has a budget, on around the loop, its figures in the metrics rows."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

from laneway.memory.collectives import InFlight
from laneway.memory.manage import manage_memory
from laneway.memory.manager import MemoryManager
from laneway.memory.summary import metrics_of, summary
from laneway.rundir import replace_file
from laneway.train.config import TrainConfig
from laneway.train.parallel import Parallel


class RunMemory:
    """What a run has of memory management; nothing, where it is off."""

    def __init__(self, manager: MemoryManager | None) -> None:
        self.manager = manager
        self._seen = 0

    @contextmanager
    def on(self, summary_file: Path | None) -> Generator[None]:
        """Around the training steps. At the end what was done is written to ``summary_file`` (None: on this rank it isn't)."""
        if self.manager is None:
            yield
            return
        try:
            with self.manager:
                yield
        finally:
            try:
                if summary_file is not None:
                    replace_file(summary_file, json.dumps(summary(self.manager)).encode())
            finally:
                self.manager.close()

    def row(self) -> dict[str, float]:
        """The fields of a metrics row, over the passes since the last call."""
        if self.manager is None:
            return {}
        self.manager.end_pass()
        new = self.manager.counted - self._seen
        self._seen = self.manager.counted
        return metrics_of(list(self.manager.passes)[-new:] if new else [])


def run_memory(config: TrainConfig, parallel: Parallel, optimizer: torch.optim.Optimizer) -> RunMemory:
    """The memory manager of a run."""
    if not config.memory.on:
        return RunMemory(None)
    flying = InFlight()
    if isinstance(parallel.call, DistributedDataParallel) and config.memory.collective_reservation:
        flying.watch(parallel.call)
    return RunMemory(manage_memory(parallel.model, optimizer, config=config.memory, busy=flying))
