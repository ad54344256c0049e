"""What this machine is: interpreter, torch, processor, memory, devices, disk, compilers, backends, packages."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from laneway import __version__
from laneway.doctor.activity import sample_paging
from laneway.doctor.bandwidth import device_rates, disk_rates, memory_rates

# Instruction sets that decide which kernels torch and we can use, as /proc/cpuinfo spells them.
INSTRUCTION_SETS = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512_bf16",
    "avx512_vnni",
    "amx_tile",
    "amx_bf16",
    "asimd",
    "bf16",
    "sve",
)
# Variables that decide how memory is given out; see advice.py for why that matters.
ALLOCATOR_VARIABLES = (
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "MALLOC_ARENA_MAX",
    "GLIBC_TUNABLES",
    "LD_PRELOAD",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "OMP_NUM_THREADS",
)


def describe_machine(folder: Path | None = None) -> dict[str, Any]:
    """Look and measure; plain JSON types.

    Args:
        folder: whose disk is measured; default: the cache folder of the token shards, or the nearest folder above it that
            exists (nothing is created but a temporary file without a name).
    """
    folder = folder or cache_folder()
    paging = sample_paging()  # before the measurements, which make the kernel busy themselves
    memory = _memory()
    rates = [*memory_rates(memory["available_bytes"]), *device_rates()]
    disk = _disk(folder)
    try:
        rates += disk_rates(folder, size=min(128 << 20, disk["free_bytes"] // 100))
    except OSError as error:
        disk["error"] = f"not measured: {error.strerror or error}"
    return {
        "laneway": __version__,
        "python": {"version": platform.python_version(), "implementation": platform.python_implementation()},
        "system": platform.platform(),
        "torch": _torch(),
        "cpu": _cpu(),
        "memory": memory,
        "paging": paging,
        "devices": _devices(),
        "accelerator_files": accelerator_files(),
        "disk": disk,
        "bandwidth": [rate.as_json() for rate in rates],
        "compilers": _compilers(),
        "distributed": _distributed(),
        "allocator": {name: os.environ[name] for name in ALLOCATOR_VARIABLES if name in os.environ},
        "memory_settings": {name: text for name, text in sorted(os.environ.items()) if name.startswith("MHC_")},
        "packages": optional_packages(),
    }


def cache_folder() -> Path:
    """Where token shards are cached, or the nearest folder above it that exists."""
    folder = Path(os.environ.get("LANEWAY_CACHE") or Path.home() / ".cache" / "laneway").absolute()
    return next(path for path in (folder, *folder.parents) if path.is_dir())


def _torch() -> dict[str, Any]:
    import torch

    return {
        "version": torch.__version__,
        "build": f"cuda {torch.version.cuda}"
        if torch.version.cuda
        else f"rocm {torch.version.hip}"
        if torch.version.hip
        else "cpu",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
    }


def _cpu() -> dict[str, Any]:
    model, flags = platform.processor() or platform.machine(), set()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        text = info.read_text("utf-8", errors="replace")
        found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
        model = found[1].strip() if found else model
        listed = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
        flags = set(listed[1].split()) if listed else set()
    return {
        "model": model,
        "cores": psutil.cpu_count(logical=False),
        "logical_cores": psutil.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else psutil.cpu_count(),
        "instruction_sets": [name for name in INSTRUCTION_SETS if name in flags],
    }


def _memory() -> dict[str, Any]:
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    limit = cgroup_limit()
    return {
        "total_bytes": memory.total,
        "available_bytes": memory.available,
        "swap_total_bytes": swap.total,
        "swap_used_bytes": swap.used,
        "limit_bytes": limit if limit is not None and limit < memory.total else None,
    }


def cgroup_limit(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Memory limit of this control group (version 2 or 1), None where there is none."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        file = root / name
        if file.is_file() and (text := file.read_text("ascii").strip()).isdigit():
            return int(text)
    return None


def _devices() -> list[dict[str, Any]]:
    import torch

    if not torch.accelerator.is_available():
        return []
    kind = torch.accelerator.current_accelerator()
    module = torch.get_device_module(kind)
    found = []
    for index in range(torch.accelerator.device_count()):
        properties = module.get_device_properties(index)
        found.append({"device": f"{kind}:{index}", "name": properties.name, "total_bytes": properties.total_memory})
    return found


def _disk(folder: Path) -> dict[str, Any]:
    usage = shutil.disk_usage(folder)
    return {"folder": str(folder), "total_bytes": usage.total, "free_bytes": usage.free}


def _compilers() -> dict[str, str | None]:
    """First line of each tool's version, None where it is absent."""
    compiler = os.environ.get("CXX") or next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), "c++")
    return {
        "c++": _first_line(compiler, "--version"),
        "ninja": _first_line("ninja", "--version") or _version("ninja"),
        "triton": _version("triton"),
        "nvcc": _last_line("nvcc", "--version"),
    }


def _run(program: str, *arguments: str) -> list[str]:
    if shutil.which(program) is None:
        return []
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def _first_line(program: str, *arguments: str) -> str | None:
    return next((line.strip() for line in _run(program, *arguments) if line.strip()), None)


def _last_line(program: str, *arguments: str) -> str | None:
    return next((line.strip() for line in reversed(_run(program, *arguments)) if line.strip()), None)


def _distributed() -> dict[str, bool]:
    import torch.distributed as dist

    if not dist.is_available():
        return {}
    return {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
        "ucc": dist.is_ucc_available(),
        "xccl": dist.is_xccl_available(),
    }


def optional_packages(distribution: str = "laneway") -> dict[str, dict[str, str | None]]:
    """Installed versions of the packages that the distribution's extras name, by extra; {} where it is not installed."""
    try:
        requirements = importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    extras: dict[str, dict[str, str | None]] = {}
    for line in requirements:
        found = re.match(r"([A-Za-z0-9._-]+).*;.*extra\s*==\s*['\"]([\w-]+)['\"]", line)
        if found:
            extras.setdefault(found[2], {})[found[1]] = _version(found[1])
    return extras


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def accelerator_files() -> list[str]:
    """Device files of accelerators that this process may see, whether or not torch can use them."""
    return [name for name in ("/dev/nvidia0", "/dev/kfd") if sys.platform == "linux" and Path(name).exists()]
