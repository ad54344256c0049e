"""The machine a run was made on, for ``env.json``."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

import psutil
import torch

import laneway
from laneway.core import LanewayError
from laneway.memory.meter import host_capacity
from laneway.train.ranks import Ranks


def cpu_model() -> str:
    """The processor's name as the system gives it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def memory_bytes() -> int:
    """Host memory that this process may use: the machine's, or less under a limit of its control group or address space."""
    total = psutil.virtual_memory().total
    try:
        return min(total, host_capacity())
    except LanewayError:  # no /proc
        return total


def describe_environment(ranks: Ranks) -> dict[str, Any]:
    """Machine, versions and command, in plain JSON types."""
    device: dict[str, Any] = {"type": ranks.device.type}
    if ranks.device.type == "cuda":
        device |= {
            "name": torch.cuda.get_device_name(ranks.device),
            "bytes": torch.cuda.get_device_properties(ranks.device).total_memory,
        }
    return {
        "laneway": laneway.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": memory_bytes(),
        "device": device,
        "world_size": ranks.world_size,
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }
