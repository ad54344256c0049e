"""Whether all ranks decided the same: a hash of each decision rides along with what the ranks reduce anyway, and is compared
in the next step. For debugging: ranks that decide by equal numbers can't differ, unless hardware or a reduction is at fault."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from laneway.core import LanewayError, Statistics


class SameDecision:
    """Compares the decisions of one control over the ranks, one step late. Off, or without ``share``, it does nothing."""

    def __init__(self, name: str, on: bool) -> None:
        self.name, self.on = f"{name}/decision", on
        self.statistics: Statistics | None = None

    def share(self, statistics: Statistics) -> None:
        """Take part in the loop's collective."""
        if self.on:
            self.statistics = statistics
            statistics.add(self.name, 1, "gather")

    def put(self, decision: Sequence[object]) -> None:
        """This rank's decision in this step."""
        if self.statistics is not None:
            # 24 bits: what fp32 holds exactly.
            self.statistics.put(self.name, float(zlib.crc32(repr(list(decision)).encode()) & 0xFFFFFF))

    def compare(self, step: int | None = None) -> None:
        """Look at the decisions of the step before, which is the one before ``step`` if that is told.

        Raises:
            LanewayError: two ranks decided differently; on all ranks.
        """
        found = None if self.statistics is None else self.statistics.get(self.name)
        if found is None:
            return
        hashes = found.flatten().tolist()
        if other := [rank for rank, value in enumerate(hashes) if value != hashes[0]]:
            when = "the step before" if step is None else f"step {step - 1}"
            raise LanewayError(f"{self.name}: in {when} rank {other[0]} decided otherwise than rank 0")
