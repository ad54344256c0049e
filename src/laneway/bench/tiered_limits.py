"""Under a hard limit that the allocator enforces: steps that need more than there is, and the largest batch of each way."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from laneway.bench.rows import Row
from laneway.bench.tiered_models import Size
from laneway.bench.tiered_peers import PEERS
from laneway.bench.tiered_subject import CPU, Subject
from laneway.bench.tiered_variants import Variant
from laneway.memory.manager import MemoryManager
from laneway.memory.survive import Survivor

LIMIT = 1.15
LARGEST = 32  # times the usual batch: not looked further
FACTORS = (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, LARGEST)


def spike_rows(subject: Subject, factors: Sequence[float], say: Callable[[str], None]) -> list[Row]:
    """After a few ordinary steps one of ``factors`` times the length: as it is, and managed with replay and split."""
    limit, found, usual, beta = int(LIMIT * subject.plain_peak), [], subject.tokens, subject.beta
    subject.active = subject.plain
    for factor in factors:
        longer = subject.batch(len(usual), int(factor * subject.size.length))
        row = _spiked(subject, usual, longer, limit)
        found.append(subject.about() | {"beta": beta, "limit_share": LIMIT, "length_factor": factor} | row)
        told = ", ".join(f"{key} {row[key]}" for key in ("plain_survived", "managed_survived", "exact", "replays", "splits"))
        say(f"  length × {factor:g}: demand {row['demand_over_limit']:.2f} of the limit, {told}")
    subject.tokens = usual
    return found


def _spiked(subject: Subject, usual: Tensor, longer: Tensor, limit: int) -> Row:
    subject.tokens = longer
    start = time.perf_counter()
    row: Row = {"demand_over_limit": subject.peak(subject.gradients) / limit}
    alone = time.perf_counter() - start
    wanted = subject.wanted = subject.gradients()  # kept on the device by the benchmark: not counted
    with subject.limited(limit):
        row["plain_survived"] = int(subject.came_through(subject.backward))
    subject.forget()
    manager = subject.managed(limit)
    survivor = Survivor(manager, subject.model, device=CPU, split=True)
    seconds = 0.0

    def spike() -> None:
        survivor.attempt(subject.backward, parts=subject.parts, combine=lambda results: None)

    with subject.limited(limit), manager:
        subject.tokens = usual
        for _ in range(3):
            survivor.attempt(subject.backward)
            subject.forget()
        subject.tokens, start = longer, time.perf_counter()
        row["managed_survived"] = int(subject.came_through(spike))
        seconds = time.perf_counter() - start
        manager.end_pass()
    found = [p.grad for p in subject.model.parameters() if p.grad is not None]
    there = len(found) == len(wanted)
    row["exact"] = int(there and all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)))
    row["gradient_error"] = _distance(found, wanted) if there else None
    row |= {"op_retries": survivor.counts["op_retry"], "replays": survivor.counts["replay"], "splits": survivor.counts["split"]}
    row["stall_seconds"] = manager.passes[-1].account.stall if manager.passes else None
    row["time_over_unlimited"] = seconds / alone
    subject.forget()
    subject.wanted = []
    return row


def _distance(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """‖found − wanted‖ / ‖wanted‖ over all of them."""
    apart = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(found, wanted, strict=True))
    return float((apart / sum(float(b.double().square().sum()) for b in wanted)) ** 0.5)


WAYS: dict[str, tuple[str, str | None]] = {
    "none": ("none", None),
    "checkpoint": ("checkpoint", None),
    "8bit": ("none", "8bit"),
    "checkpoint 8bit": ("checkpoint", "8bit"),
    "managed": ("managed", "resident"),
    "managed 8bit": ("managed", "8bit"),
    "managed streamed": ("managed", "streamed"),
    "managed streamed-8bit": ("managed", "streamed-8bit"),
}
"""What is done about the saved tensors, and about the optimizer's state."""


def small(size: Size) -> Size:
    """A quarter of the batch: most of its step's memory is parameters, gradients and optimizer state."""
    return replace(size, batch=max(1, size.batch // 4))


def batch_rows(subject: Subject, say: Callable[[str], None]) -> list[Row]:
    """The largest batch with which two whole training steps succeed under the limit, for each of ``WAYS``.

    Looked for among ``FACTORS`` times the usual batch. A managed step may be replayed, not split.
    """
    limit, usual, beta = int(LIMIT * subject.plain_peak), subject.tokens, subject.beta
    sizes = sorted({int(factor * len(usual)) for factor in FACTORS})
    found: list[Row] = []
    for way in WAYS:
        largest, seconds = _largest(subject, way, sizes, limit)
        row: Row = subject.about() | {"beta": beta, "limit_share": LIMIT, "variant": way, "batch": largest}
        row["batch_over_none"] = largest / found[0]["batch"] if found else 1.0
        row["tokens_per_s"] = largest * subject.size.length / seconds if seconds else None
        row["at_most_tried"] = int(largest == sizes[-1])
        found.append(row)
        say(f"  {way}: batch {largest} under {limit / 2**20:.0f} MiB")
    subject.tokens, subject.active = usual, subject.plain
    return found


def _largest(subject: Subject, way: str, sizes: Sequence[int], limit: int) -> tuple[int, float]:
    """By bisection: the batch, and the seconds of its second step; 0 where not even the least goes."""
    low, high, seconds = -1, len(sizes), 0.0
    while high - low > 1:
        middle = min(low + 3, (low + high) // 2)
        took = _trains(subject, way, sizes[middle], limit)
        if took is None:
            high = middle
        else:
            low, seconds = middle, took
    return (sizes[low] if low >= 0 else 0), seconds


def _trains(subject: Subject, way: str, batch: int, limit: int) -> float | None:
    """Two steps with a fresh optimizer; the seconds of the second, None where memory did not suffice."""
    saved, state = WAYS[way]
    trained = subject.another()
    subject.tokens, subject.active = subject.batch(batch), trained
    manager = subject.managed(limit, trained, state or "resident") if saved == "managed" else None
    if manager is None and state is not None:
        subject.few_bits(trained, state)
    around: Callable[[], Any] = (lambda: manager) if manager is not None else (lambda: PEERS[saved](subject.model))
    variant = Variant(way, 1.0, around, trained, manager)
    took = [0.0]

    def steps() -> None:
        for _ in range(2):
            start = time.perf_counter()
            _step(subject, variant)
            took[0] = time.perf_counter() - start

    with subject.limited(limit):
        came = subject.came_through(steps)
    subject.release(trained, manager)
    return took[0] if came else None


def _step(subject: Subject, variant: Variant) -> None:
    manager: MemoryManager | None = variant.manager
    with variant.around():
        if manager is None:
            subject.step()
            return
        survivor = Survivor(manager, subject.model, device=CPU)
        survivor.attempt(subject.backward)
        manager.end_pass()
        survivor.step(variant.trained.optimizer)
    subject.forget()
