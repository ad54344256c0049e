"""Pipeline schedules: 1F1B and interleaved 1F1B (Narayanan et al. 2021)."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["bubble_seconds"]


def bubble_seconds(stages: Sequence[float], chunks: int = 1) -> float:
    """Seconds until the last stage has its first micro-batch, and after its last one: all stages but the slowest, once.

    Exact for 1F1B with equal stages; with unequal ones it is the time one micro-batch takes through all others.
    """
    return (sum(stages) - max(stages)) / chunks
