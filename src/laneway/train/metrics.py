"""Rows of the metrics files, and the figures in them that come from this process: time and memory."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from laneway.train.patient import PatientRows


def peak_bytes(device: torch.device) -> int:
    """Most bytes in use so far: allocated on an accelerator, resident in the whole process on the CPU."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kibibytes everywhere but on macOS


class StepClock:
    """Time spent in optimizer steps, their data included; validation, probes and saving stand outside."""

    def __init__(self) -> None:
        self.steps, self.tokens, self.seconds = 0, 0, 0.0

    @contextmanager
    def step(self) -> Generator[None]:
        """Around one step; it ends with a transfer to the host, so the device has finished too."""
        start = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - start
        self.steps += 1

    def count(self, tokens: int) -> None:
        """So many tokens, over all ranks, belong to the step."""
        self.tokens += tokens

    def take(self) -> dict[str, float]:
        """``step_ms`` (mean) and ``tokens_per_s`` (all ranks) since the last call."""
        steps, tokens, seconds = self.steps, self.tokens, self.seconds
        self.steps, self.tokens, self.seconds = 0, 0, 0.0
        return {"step_ms": 1000 * seconds / steps, "tokens_per_s": tokens / seconds} if steps else {}


class MetricsWriter:
    """Appends rows to one rank's file; ``patient``: through a full disk, see ``PatientRows``."""

    def __init__(self, path: Path, patient: bool = False) -> None:
        self.rows = PatientRows(path, patient)

    def write(self, step: int, fields: Mapping[str, Any]) -> None:
        """Append one row; what is no finite number is written as null, which JSON has and NaN it has not."""
        self.rows.append({"step": step, "time": time.time()} | {key: plain(value) for key, value in fields.items()})


def plain(value: Any) -> Any:
    """``value`` as JSON can hold it."""
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
