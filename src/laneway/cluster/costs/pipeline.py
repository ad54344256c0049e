"""Pipeline schedules: 1F1B and interleaved 1F1B (Narayanan et al. 2021)."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["bubble_fraction", "bubble_seconds", "steady_seconds"]


def bubble_fraction(pp: int, micro_batches: int, chunks: int = 1) -> float:
    """Idle time over busy time of a rank, all stages alike: (p - 1)/m, interleaved (p - 1)/(v·m)."""
    return (pp - 1) / (chunks * micro_batches)


def steady_seconds(stages: Sequence[float], micro_batches: int) -> float:
    """Seconds in which the slowest stage works off all micro-batches; `stages`: seconds a micro-batch, forward and backward."""
    return micro_batches * max(stages)


def bubble_seconds(stages: Sequence[float], chunks: int = 1) -> float:
    """Seconds until the last stage has its first micro-batch, and after its last one: all stages but the slowest, once.

    Exact for 1F1B with equal stages; with unequal ones it is the time one micro-batch takes through all others.
    """
    return (sum(stages) - max(stages)) / chunks
