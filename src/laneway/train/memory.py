"""The memory manager in a run: made where the configuration has a budget, on around the loop, its figures in the metrics rows."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from laneway.memory.collectives import InFlight
from laneway.memory.manage import make_optimizer_state, manage_memory
from laneway.memory.manager import MemoryManager
from laneway.memory.reduce import Agreement, reduce_gradients
from laneway.memory.summary import metrics_of, summary
from laneway.memory.survive import Survivor
from laneway.rundir import FULL_DISK, replace_file
from laneway.train.config import TrainConfig
from laneway.train.parallel import Parallel

T = TypeVar("T")
_log = logging.getLogger("laneway")


class RunMemory:
    """What a run has of memory management; nothing, where it is off."""

    def __init__(
        self,
        manager: MemoryManager | None,
        survivor: Survivor | None = None,
        average: bool = False,
        flying: InFlight | None = None,
    ) -> None:
        self.manager, self.survivor, self.average = manager, survivor, average
        self.flying = flying or InFlight()
        self._seen = 0
        self._survived: dict[str, int] = {}
        self._told = 0.0, 0.0

    def attempt(self, run: Callable[[], Tensor]) -> Tensor:
        """Forward and backward of a micro-batch; again, where it ran out of memory."""
        return run() if self.survivor is None else self.survivor.attempt(run)

    def reduce(self, model: nn.Module) -> None:
        """After the last backward pass: gradients and parameters are here, and averaged where the passes left that for later."""
        if self.manager is not None:
            self.manager.bring_all()
        if self.average:
            with self.flying.collective():
                reduce_gradients(model)

    def repeat(self, work: Callable[[], T]) -> T:
        """Work on the gradients that changes nothing before its last allocation; again, where it ran out of memory."""
        return work() if self.survivor is None or self.survivor.sharded else self.survivor.repeat(work)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer's step, once."""
        if self.survivor is None:
            optimizer.step()
        else:
            self.survivor.step(optimizer)

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
                    _write(summary_file, json.dumps(summary(self.manager)).encode())
            finally:
                self.manager.close()

    def survived(self) -> dict[str, int]:
        """How often memory was missing since the last call, by what was done (``op_retry``, ``replay``); empty: never."""
        counts = {} if self.survivor is None else dict(self.survivor.counts)
        new = {kind: count - self._survived.get(kind, 0) for kind, count in counts.items()}
        self._survived = counts
        return {kind: count for kind, count in new.items() if count}

    def row(self) -> dict[str, float]:
        """The fields of a metrics row, over the passes since the last call."""
        if self.manager is None:
            return {}
        self.manager.end_pass()
        row = metrics_of(self.manager.since(self._seen))
        self._seen = self.manager.counted
        if self.flying.seen:
            contention, held = self.flying.contention_seconds, self.flying.held_seconds
            row["memory_transfer_contention_seconds"] = contention - self._told[0]
            row["memory_transfer_held_seconds"] = held - self._told[1]
            self._told = contention, held
        if self.survivor is not None:
            row |= {f"memory_{kind}": count for kind, count in self.survivor.counts.items()}
        return row


def _write(path: Path, data: bytes) -> None:
    """A full disk costs this description, not the run's last checkpoint, which comes after it."""
    try:
        replace_file(path, data)
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        _log.warning("%s could not be written: %s", path, error.strerror)


def run_memory(config: TrainConfig, parallel: Parallel, optimizer: torch.optim.Optimizer) -> RunMemory:
    """The memory manager of a run, and what replays its micro-batches."""
    if not config.memory.on:
        if config.memory.optimizer_bits != 32:
            make_optimizer_state(
                replace(config.memory, optimizer_state="device"), optimizer, None
            )  # in the optimizer from here on
        return RunMemory(None)
    flying, ddp, average = InFlight(), parallel.call, False
    if isinstance(ddp, DistributedDataParallel):
        average = config.memory.replay
        if not average:
            flying.watch(ddp)
    manager = manage_memory(parallel.model, optimizer, config=config.memory, busy=flying, stay_without_grad=True)
    manager.bring_all()  # until the first step: a checkpoint may have to be read
    survivor = None
    if config.memory.replay:
        agree = Agreement(parallel.device) if average else None
        survivor = Survivor(manager, parallel.call, device=parallel.device, agree=agree)
    return RunMemory(manager, survivor, average, flying)
