"""How busy the kernel is with memory, right now: a short sample of Linux's counters, of the whole machine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

SECONDS = 0.5
# proc(5): user nice system idle iowait irq softirq steal; guest time, which follows, is already in user.
FIELDS, KERNEL = 8, (2, 5, 6)
COUNTERS = {"pgmajfault": "major_faults_per_s", "pswpin": "pages_in_per_s", "pswpout": "pages_out_per_s"}


def sample_paging(seconds: float = SECONDS, proc: Path = Path("/proc")) -> dict[str, Any] | None:
    """Rates over ``seconds``; None where the system has no such counters.

    ``system_share``: part of all processor time that went to the kernel (%sys, with interrupts). ``major_faults_per_s``: pages
    that a process waited for until they were read from a disk. ``pages_in_per_s`` and ``pages_out_per_s``: pages read from and
    written to swap.
    """
    try:
        before, start = _read(proc), time.monotonic()
        time.sleep(seconds)
        after, passed = _read(proc), time.monotonic() - start
    except (OSError, ValueError, IndexError):
        return None
    ticks = [new - old for old, new in zip(before[0], after[0], strict=True)]
    share = sum(ticks[index] for index in KERNEL) / max(1, sum(ticks))
    rates = {told: (after[1].get(name, 0) - before[1].get(name, 0)) / passed for name, told in COUNTERS.items()}
    return {"seconds": passed, "system_share": share} | rates


def _read(proc: Path) -> tuple[list[int], dict[str, int]]:
    """Ticks of all processors by kind, and the counters of virtual memory."""
    first = (proc / "stat").read_text("ascii").splitlines()[0].split()
    if first[0] != "cpu" or len(first) < 1 + FIELDS:
        raise ValueError("no line of all processors")
    pairs = (line.split() for line in (proc / "vmstat").read_text("ascii").splitlines())
    return [int(tick) for tick in first[1 : 1 + FIELDS]], {name: int(value) for name, value in pairs if name in COUNTERS}
