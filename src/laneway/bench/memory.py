"""Peak memory of a piece of work, counted to the byte.

On the CPU every allocation and release of torch's allocator is recorded by torch.profiler (``profile_memory``) and added up in
the order it happened. That covers eager operators, tensors that autograd keeps for the backward pass, and buffers of compiled
code alike, and does not depend on what malloc gives back to the system, as a resident-set figure would. Scratch space that a
library allocates for itself (oneDNN, MKL, OpenMP stacks) does not pass through the allocator and is not counted.
On an accelerator the figure is that of its caching allocator.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

NOISE = ("USDT:", "STAGE:")  # what the profiler itself writes to stderr, whatever its log level


def peak_bytes(work: Callable[[], object], device: torch.device | str = "cpu") -> int:
    """Most bytes of tensors alive at once during ``work()``, over what was alive before it.

    Run it once before, so that one-time work (compilation, caches) is over. What ``work`` allocates it must also release
    or return: the result is dropped before the recording ends.
    """
    device = torch.device(device)
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
        torch.accelerator.reset_peak_memory_stats(device)
        before = torch.accelerator.memory_allocated(device)
        work()
        torch.accelerator.synchronize(device)
        return torch.accelerator.max_memory_allocated(device) - before
    return highest(_allocations(recorded(work, profile_memory=True)))


def recorded(work: Callable[[], object], **options: Any) -> profile:
    """torch.profiler's recording of what ``work()`` does on the host; ``options`` are the profiler's."""
    recording = profile(activities=[ProfilerActivity.CPU], **options)
    with _without_noise():
        recording.start()
    try:
        work()
    finally:
        with _without_noise():
            recording.stop()
    return recording


def highest(changes: Iterable[int]) -> int:
    """Highest running sum of signed sizes (0 for none)."""
    level = top = 0
    for change in changes:
        level += change
        top = max(top, level)
    return top


def _allocations(recording: Any) -> list[int]:
    """Signed bytes of every allocation (+) and release (−), in time order."""
    found: list[tuple[int, int]] = []
    stack = list(recording.profiler.kineto_results.experimental_event_tree())
    while stack:
        event = stack.pop()
        stack.extend(event.children)
        if event.tag.name == "Allocation":
            found.append((event.start_time_ns, event.extra_fields.alloc_size))
    return [size for _, size in sorted(found, key=lambda item: item[0])]


@contextmanager
def _without_noise() -> Iterator[None]:
    """Hold back the profiler's own lines on file descriptor 2; anything else is passed on afterwards."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            caught.seek(0)
            for line in caught.read().decode(errors="replace").splitlines(keepends=True):
                if not line.startswith(NOISE):
                    sys.stderr.write(line)
