"""Sums over all ranks that a control measures in one step and follows in a later one."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from laneway.connections.agreement import SameDecision
from laneway.core import Statistics


class LateSums(ABC):
    """The part of an extension that shares its sums: they ride along with the loop's collective, or stay as they are without it.

    Args:
        name: of the sums among the statistics.
        sums: fp32 [n], what holds until something was measured.
        verify: compare a hash of what each step follows over the ranks, one step late, where a loop shares statistics.
    """

    def __init__(self, name: str, sums: Tensor, verify: bool = False) -> None:
        self._name, self._sums = name, sums
        self._agreement = SameDecision(name, verify)
        self._shared: Statistics | None = None
        self._pending = False

    def statistics(self) -> dict[str, Tensor]:
        """What this rank measured last: fp32 sums, to be added up over the ranks."""
        return {self._name: self._sums}

    @abstractmethod
    def apply_statistics(self, statistics: dict[str, Tensor]) -> None:
        """Take in sums over all ranks."""

    def share(self, statistics: Statistics) -> None:
        """Let the loop add the ranks' sums."""
        statistics.add(self._name, len(self._sums), "sum")
        self._shared = statistics
        self._agreement.share(statistics)

    def follow(self) -> None:
        """Apply what was measured in the last step, if anything was.

        Raises:
            LanewayError: with ``verify``, two ranks decided differently in the step before.
        """
        self._agreement.compare()
        if self._pending:
            self.apply_statistics(self.statistics() if self._shared is None else {self._name: self._shared.get(self._name)})
            self._pending = False

    def decided(self, decision: Tensor) -> None:
        """What this step follows; with ``verify`` the host waits for it."""
        if self._agreement.statistics is not None:
            self._agreement.put(decision.flatten().tolist())

    def measured(self, sums: Tensor) -> None:
        """Sums of this step; they are followed in the next."""
        self._sums, self._pending = sums, True
        if self._shared is not None:
            self._shared.put(self._name, sums)
