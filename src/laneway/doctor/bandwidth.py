"""What the memory tiers of this machine do, measured now: memory, accelerator, disk. A few seconds in all.

Rates are bytes of payload a second: a copy of 1 GiB in 1 s is 1 GiB/s, though the bus moved twice that.
"""

from __future__ import annotations

import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Larger than any cache near the cores, small enough for a small machine.
MEMORY_BYTES, DISK_BYTES, CHUNK = 128 << 20, 128 << 20, 8 << 20
REPEATS, SECONDS = 7, 1.0


@dataclass(frozen=True)
class Rate:
    """One measured rate: median and the slowest and fastest repeat, in bytes a second."""

    what: str
    bytes_per_s: float
    low: float
    high: float
    payload_bytes: int
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)


def measure(what: str, payload: int, action: Callable[[], object], note: str = "", seconds: float = SECONDS) -> Rate:
    """Time ``action`` once to warm up, then up to ``REPEATS`` times or ``seconds``, whichever ends first."""
    action()
    rates: list[float] = []
    until = time.perf_counter() + seconds
    while len(rates) < REPEATS and (not rates or time.perf_counter() < until):
        start = time.perf_counter()
        action()
        rates.append(payload / max(time.perf_counter() - start, 1e-9))
    return Rate(what, statistics.median(rates), min(rates), max(rates), payload, note)


def memory_rates(available: int) -> list[Rate]:
    """Copy between two existing buffers, and the same into a fresh tensor, which also pays for new pages.

    Args:
        available: free memory in bytes; a sixteenth of it is the most that one buffer takes.
    """
    import torch

    size = max(1 << 20, min(MEMORY_BYTES, available // 16))
    source = torch.zeros(size, dtype=torch.uint8)
    target = torch.empty_like(source)
    threads = f"{torch.get_num_threads()} threads"
    return [
        measure("memory copy", size, lambda: target.copy_(source), threads),
        measure("memory, fresh tensor", size, lambda: source.clone(), threads),
    ]


def device_rates() -> list[Rate]:
    """Copies within the accelerator and to and from pinned memory; empty where torch has no accelerator."""
    import torch

    if not torch.accelerator.is_available():
        return []
    device = torch.accelerator.current_accelerator()
    size = MEMORY_BYTES
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target, host = torch.empty_like(source), torch.zeros(size, dtype=torch.uint8, pin_memory=True)

    def copy(to: Any, origin: Any) -> None:
        to.copy_(origin, non_blocking=True)
        torch.accelerator.synchronize()

    name = str(device)
    return [
        measure(f"{name} copy", size, lambda: copy(target, source)),
        measure(f"pinned memory to {name}", size, lambda: copy(target, host)),
        measure(f"{name} to pinned memory", size, lambda: copy(host, source)),
    ]


def disk_rates(folder: Path, size: int = DISK_BYTES, direct: bool = True) -> list[Rate]:
    """Write and read back one temporary file in ``folder``; nothing of it stays, also after a kill.

    The page cache is gone round with O_DIRECT where the file system allows it; elsewhere the write is flushed and the
    cache is asked to forget the file, and the rates say so.

    Raises:
        OSError: the folder can't be written, or the disk is full.
    """
    descriptor, name = tempfile.mkstemp(prefix=".laneway-doctor-", dir=folder)
    try:
        os.unlink(name)  # the open file lives on without a name, and ends with this process
        bypassed = direct and _go_direct(descriptor)
        note = "page cache bypassed" if bypassed else "page cache may take part"
        with mmap.mmap(-1, CHUNK) as buffer:  # page-aligned, as O_DIRECT wants it
            buffer.write(os.urandom(1 << 16) * (CHUNK >> 16))  # not zeros: some file systems store those as nothing
            try:
                write = _timed("disk write", size, lambda: _write(descriptor, buffer, size), note)
            except OSError:
                if not bypassed:
                    raise
                # A file system that takes the flag and refuses the write.
                return disk_rates(folder, size, direct=False)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            return [write, _timed("disk read", size, lambda: _read(descriptor, buffer), note)]
    finally:
        os.close(descriptor)


def _go_direct(descriptor: int) -> bool:
    """Turn O_DIRECT on for an open file; False where the system or the file system has none."""
    if not hasattr(os, "O_DIRECT"):
        return False
    import fcntl

    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError:
        return False
    return True


def _timed(what: str, size: int, action: Callable[[], int], note: str) -> Rate:
    """One run of at most a few seconds; the rate is over what was moved by then."""
    start = time.perf_counter()
    moved = action()
    rate = moved / max(time.perf_counter() - start, 1e-9)
    return Rate(what, rate, rate, rate, moved, note)


def _write(descriptor: int, buffer: mmap.mmap, size: int) -> int:
    until, moved = time.perf_counter() + SECONDS, 0
    with memoryview(buffer) as view:
        while moved < size and time.perf_counter() < until:
            moved += os.write(descriptor, view)
    os.fsync(descriptor)
    return moved


def _read(descriptor: int, buffer: mmap.mmap) -> int:
    until, moved = time.perf_counter() + SECONDS, 0
    os.lseek(descriptor, 0, os.SEEK_SET)
    while time.perf_counter() < until and (part := os.readv(descriptor, [buffer])):
        moved += part
    return moved
