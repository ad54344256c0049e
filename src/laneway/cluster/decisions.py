"""Whether all ranks decided the same: a digest rides along with what the ranks reduce anyway, compared a step later. No torch."""

from __future__ import annotations

import hashlib
import math

from laneway.core import LanewayError, Statistics

__all__ = ["SameDecision", "digest"]

HALF = 1 << 24  # fp32 holds every integer below it


def digest(text: str) -> int:
    """48 bits that differ where texts do."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")


class SameDecision:
    """Compares the decisions of the ranks by their largest and smallest digest. Off, it takes no part in anything.

    Args:
        name: of its numbers among the statistics.
        on: whether it compares.
        trouble: the error's text, where ``{step}`` stands for the step in which ranks differed.
    """

    def __init__(self, name: str, on: bool, trouble: str) -> None:
        self.name, self.on, self.trouble = name, on, trouble

    def share(self, statistics: Statistics) -> None:
        """Make room."""
        if self.on:
            statistics.add(self.name, 4, "max")

    def put(self, statistics: Statistics, decision: int) -> None:
        """The digest of this rank's decision in this step."""
        if self.on:
            high, low = divmod(decision, HALF)
            statistics.put(self.name, [float(high), -float(high), float(low), -float(low)])

    def compare(self, statistics: Statistics, step: int) -> None:
        """Look at the decisions of ``step``, which was the last.

        Raises:
            LanewayError: they were not the same; on all ranks.
        """
        found = statistics.get(self.name) if self.on else None
        if found is None:
            return
        high, less_high, low, less_low = found.tolist()
        if math.isfinite(high) and (high != -less_high or low != -less_low):
            raise LanewayError(self.trouble.format(step=step))
