"""How much memory of a device is in use, was in use at most, and is there at all; the same four questions for every device."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

from laneway.core import LanewayError
from laneway.memory.counting import CountingAllocator

PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")


@runtime_checkable
class Meter(Protocol):
    """Memory of one device, in bytes."""

    def live(self) -> int:
        """In use now."""

    def peak(self) -> int:
        """The most that was in use since ``reset_peak``, else since the start."""

    def reset_peak(self) -> None:
        """Let the peak begin again at what is in use now."""

    def capacity(self) -> int:
        """The most that can be in use."""


def device_meter(device: torch.device) -> Meter:
    """The best meter there is for ``device``.

    An accelerator: bytes of tensors, as its allocator counts them. The CPU: bytes of tensors where the counting allocator is
    installed (at this call), else the resident bytes of the whole process.

    Raises:
        LanewayError: the device is neither the CPU nor of the accelerator's kind, or the CPU's memory cannot be read here.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and device.type == accelerator.type:
        return AcceleratorMeter(device)
    if device.type != "cpu":
        known = "cpu" if accelerator is None else f"cpu, {accelerator.type}"
        raise LanewayError(f"no memory meter for device {str(device)!r}; accepted here: {known}")
    counting = CountingAllocator.installed()
    return ProcessMeter() if counting is None else CountingMeter(counting)


class AcceleratorMeter:
    """Bytes that tensors hold on an accelerator, by torch's device-neutral statistics.

    Blocks that its allocator keeps for reuse do not count. The capacity is the hardware's, whoever else uses it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def live(self) -> int:
        """Bytes of tensors now."""
        return torch.accelerator.memory_allocated(self._device)

    def peak(self) -> int:
        """The most bytes of tensors."""
        return torch.accelerator.max_memory_allocated(self._device)

    def reset_peak(self) -> None:
        """Begin again at ``live``."""
        torch.accelerator.reset_peak_memory_stats(self._device)

    def capacity(self) -> int:
        """Bytes that the device has."""
        if hasattr(torch.accelerator, "get_memory_info"):  # from torch 2.10 on
            return torch.accelerator.get_memory_info(self._device)[1]
        return torch.get_device_module(self._device).get_device_properties(self._device).total_memory


class CountingMeter:
    """Bytes that CPU tensors asked the counting allocator for: exact."""

    def __init__(self, allocator: CountingAllocator) -> None:
        self._allocator = allocator

    def live(self) -> int:
        """Bytes of tensors now."""
        return self._allocator.live

    def peak(self) -> int:
        """The most bytes of tensors."""
        return self._allocator.peak

    def reset_peak(self) -> None:
        """Begin again at ``live``."""
        self._allocator.reset_peak()

    def capacity(self) -> int:
        """The allocator's limit where it is less than what the process may use."""
        limit, host = self._allocator.limited_to, host_capacity()
        return host if limit is None else min(limit, host)


class ProcessMeter:
    """Resident bytes of the process, from /proc: tensors, libraries and everything else.

    The system counts pages lazily, so that single megabytes may be missing; memory that was freed but stays with the process
    counts as used.
    """

    def __init__(self, process: Path = PROC / "self") -> None:
        """``process``: the folder of /proc to read.

        Raises:
            LanewayError: it has not what is read.
        """
        self._process = process
        try:
            self.live(), self.peak()
        except (OSError, StopIteration) as error:
            raise LanewayError(
                f"resident memory is read from {process}, which this system has not; install the counting allocator"
            ) from error

    def live(self) -> int:
        """Resident bytes now."""
        return int((self._process / "statm").read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def peak(self) -> int:
        """The most resident bytes (the system's high-water mark), not less than ``live`` at this call."""
        return max(_kilobytes(self._process / "status", "VmHWM"), self.live())

    def reset_peak(self) -> None:
        """Begin again at ``live``.

        Raises:
            LanewayError: the system does not let the process do so.
        """
        try:
            (self._process / "clear_refs").write_text("5", "ascii")
        except OSError as error:
            raise LanewayError(f"the peak of resident memory cannot be reset here: {error}") from error

    def capacity(self) -> int:
        """What the process may use."""
        return host_capacity()


def host_capacity(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Bytes of host memory that this process may use.

    The least of the machine's memory, the limits of the process's control group and of those above it (version 1 or 2), and
    the limit of its address space (RLIMIT_AS) where one is set.

    Args:
        proc, cgroup: where these file systems are.

    Raises:
        LanewayError: the system has no /proc/meminfo.
    """
    try:
        limits = [_kilobytes(proc / "meminfo", "MemTotal")]
    except (OSError, StopIteration) as error:
        raise LanewayError(f"the size of host memory is read from {proc / 'meminfo'}, which this system has not") from error
    limits += _group_limits(proc / "self" / "cgroup", cgroup)
    if sys.platform != "win32":
        import resource

        soft = resource.getrlimit(resource.RLIMIT_AS)[0]
        limits += [] if soft == resource.RLIM_INFINITY else [soft]
    return min(limits)


def _kilobytes(file: Path, field: str) -> int:
    """A field in kB of a file such as /proc/meminfo, in bytes."""
    line = next(line for line in file.read_text("ascii", "replace").splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def _group_limits(listed: Path, root: Path) -> Iterator[int]:
    """Every memory limit on the way from the process's control group up to the root that is visible here."""
    try:
        lines = listed.read_text("utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mounts, name = [root, root / "unified"], "memory.max"
        elif "memory" in controllers.split(","):
            mounts, name = [root / "memory", root / controllers], "memory.limit_in_bytes"
        else:
            continue
        below = Path(path.lstrip("/"))
        for mount in mounts:
            for group in (below, *below.parents):
                yield from _limit(mount / group / name)


def _limit(file: Path) -> Iterator[int]:
    """The number in ``file``; nothing where there is no such file or it says ``max``."""
    try:
        text = file.read_text("ascii").strip()
    except OSError:
        return
    if text.isdigit():
        yield int(text)
