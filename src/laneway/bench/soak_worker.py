"""The process of a soak that trains: ``laneway.train`` with the protections of its variant, under its limit, with its faults."""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.hooks import RemovableHandle

from laneway.bench.soak_schedule import PROTECTIONS, Fault, Job, Progress, length
from laneway.checkpoint import CheckpointStore
from laneway.core import LanewayError
from laneway.data.text import TextDataConfig
from laneway.memory.config import MemoryConfig
from laneway.memory.counting import CountingAllocator
from laneway.memory.oom import out_of_memory
from laneway.models.gpt import GPTConfig
from laneway.rundir import RunDirectory
from laneway.train.config import OptimizerConfig, TrainConfig
from laneway.train.loop import Batch, train

Tell = Callable[[dict[str, Any]], None]
RUN, TIER, FILLER = "run", "tier", "filler"  # in the job's folder
SMALL_FILES = 1 << 10  # bytes: the size limit that stands for a full disk where no file system can be filled


def work(job: Job, progress: Progress, real_disk: bool, tell: Tell) -> int:
    """Train until the end or the next fault that can't be got over; returns the exit code. ``tell`` hears of every step.

    Args:
        job: the run.
        progress: what has happened to it so far.
        real_disk: ``job.folder`` is on a file system of its own that may be filled.
        tell: takes what JSON can hold.
    """
    torch.set_num_threads(1)
    allocator = CountingAllocator.install(caching=True)
    allocator.limit(job.limit)
    faults = _Faults(job, progress, real_disk, tell, allocator)
    try:
        _train(job, faults, tell)
    except Exception as error:  # noqa: BLE001  whatever it is, the supervisor must hear of it
        tell({"cause": _cause(error), "message": f"{type(error).__name__}: {error}"[:500]})
        return 1
    return 0


def _train(job: Job, faults: _Faults, tell: Tell) -> None:
    folder = Path(job.folder) / RUN
    resume = (folder / "config.toml").is_file()
    if resume and not PROTECTIONS[job.variant].falls_back:
        store = CheckpointStore(RunDirectory(folder))
        for newest in store.steps()[-1:]:
            store.load(newest, {})  # raises where it is damaged: a plain loop loads the newest, or stops
    result = train(configuration(job), out=folder, resume=resume, extensions=[faults], on_batch=faults.on_batch, console=None)
    weights = (folder / "export" / "model.safetensors").read_bytes()
    tell({"cause": "finished", "loss": result.val_loss, "weights": hashlib.sha256(weights).hexdigest()})


def configuration(job: Job) -> TrainConfig:
    """The run's configuration: where variants differ, it is in what protects them alone."""
    work, on = job.workload, PROTECTIONS[job.variant]
    memory = MemoryConfig()
    if on.memory_manager:
        tier = str(Path(job.folder) / TIER)
        memory = MemoryConfig(budget=str(job.budget), tier="disk", folder=tier, collective_reservation=0.0)
    return TrainConfig(
        model=GPTConfig(context=work.context, layers=work.layers, heads=work.heads, dim=work.dim, streams=work.streams),
        data=TextDataConfig(path=work.text, cache=work.cache),
        optimizer=OptimizerConfig(lr=work.lr),
        memory=memory,
        steps=work.steps,
        batch_size=work.batch_size,
        seed=job.seed,
        device="cpu",
        probe_every=0,
        validate_every=0,
        validation_batches=1,
        checkpoint_every=work.checkpoint_every,
        sample_tokens=0,
        max_nonfinite=10 if on.skips_nonfinite else 1,
        max_failed_checkpoints=3 if on.outlasts_full_disk else 0,
    )


class _Faults:
    """Takes part in every step: tells of it, and makes happen what is due in it."""

    def __init__(self, job: Job, progress: Progress, real_disk: bool, tell: Tell, allocator: CountingAllocator) -> None:
        self.job, self.real_disk, self.tell, self.allocator = job, real_disk, tell, allocator
        self.of_batch = {fault.step: fault for fault in job.faults if fault.step not in progress.replaced}
        self.once = {fault.step: fault for fault in progress.pending}
        self.began = 0.0
        self.disk_free_at = 0
        self.poison: RemovableHandle | None = None

    def on_step_begin(self, step: int) -> None:
        self.tell({"begin": step})
        self.began = time.perf_counter()
        if self.job.limit is None:
            self.allocator.reset_peak()
        if step == self.disk_free_at:
            free_disk(Path(self.job.folder))
        if self._due(self.of_batch, step, "nan"):
            hook: Any = _poison  # torch's annotation has no hooks that change the output, its documentation has
            self.poison = register_module_forward_hook(hook)
        if self._due(self.once, step, "disk"):
            self.tell({"fired": step})
            self.disk_free_at = step + self.job.workload.checkpoint_every
            fill_disk(Path(self.job.folder), self.real_disk)

    def on_batch(self, step: int, batch: Batch) -> Batch:
        """The batch cut to the step's length."""
        lengths = self.job.workload.lengths
        tokens = length(self.job.seed, step, lengths)
        if spike := self._due(self.of_batch, step, "spike"):
            tokens = spike.factor * max(lengths)
        return batch[0][:, :tokens], batch[1][:, :tokens]

    def on_backward_end(self, step: int) -> None:
        if self._due(self.once, step, "kill", "corrupt"):
            self.tell({"fired": step})
            os.kill(os.getpid(), signal.SIGKILL)

    def on_step_end(self, step: int, metrics: dict[str, Any]) -> None:
        if self.poison is not None:
            self.poison.remove()
            self.poison = None
        seconds = time.perf_counter() - self.began
        peak = self.allocator.peak if self.job.limit is None else None
        self.tell({"done": step, "seconds": seconds, "skipped": metrics.get("skipped", 0), "peak": peak})

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def _due(self, faults: dict[int, Fault], step: int, *kinds: str) -> Fault | None:
        fault = faults.get(step)
        return fault if fault is not None and fault.kind in kinds else None


def _poison(module: nn.Module, given: Any, output: Any) -> Tensor | None:
    """A forward hook of all modules: one number of what an embedding gives is NaN."""
    if not isinstance(module, nn.Embedding):
        return None
    output = output.clone()
    output[0, 0, 0] = float("nan")
    return output


def fill_disk(folder: Path, real_disk: bool) -> None:
    """Leave no room in the file system of ``folder``; else let no file grow beyond a limit."""
    if not real_disk:
        resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL_FILES, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        return
    with (folder / FILLER).open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            block = bytes(size)
            with contextlib.suppress(OSError):
                while file.write(block) == size:
                    pass


def free_disk(folder: Path) -> None:
    """Undo of ``fill_disk``."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    (folder / FILLER).unlink(missing_ok=True)


def _cause(error: Exception) -> str:
    """What ended the process, by the kind of fault."""
    text = str(error)
    if out_of_memory(error):
        return "spike"
    if "was not finite" in text:
        return "nan"
    if any(words in text for words in ("no space left", "larger than this process may write")):
        return "disk"
    if isinstance(error, LanewayError) and any(words in text for words in ("damaged", "does not fit:")):
        return "corrupt"
    return "other"
