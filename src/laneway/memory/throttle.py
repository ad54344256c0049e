"""A cap on what transfers may take of a link: bytes and operations per second, and less while a collective is in flight."""

from __future__ import annotations

from collections.abc import Callable

from laneway.memory.sharing import Sharing


class Throttle:
    """Token buckets for bytes, for operations and for the link itself; what goes ahead unasked is paid back later.

    Each holds at most ``burst`` seconds of unused allowance.

    Args:
        bytes_per_second, operations_per_second: the caps; 0: none.
        reservation: share of the link and of the caps that is taken away while ``busy()`` says a collective is in flight, 0 to 1.
        busy: whether one is. A ``Sharing`` is also told what the transfers do.
        burst: seconds of unused allowance that may be saved up.
    """

    def __init__(
        self,
        bytes_per_second: float = 0.0,
        operations_per_second: float = 0.0,
        reservation: float = 0.0,
        busy: Callable[[], bool] = lambda: False,
        burst: float = 0.1,
    ) -> None:
        self.bytes_per_second, self.operations_per_second = bytes_per_second, operations_per_second
        self.reservation, self.busy, self.burst = reservation, busy, burst
        self.sharing = busy if isinstance(busy, Sharing) else None
        self._last: float | None = None
        # Seconds at the full rate of bytes, operations and the link that were used in advance; negative: saved up.
        self._debts = [0.0, 0.0, 0.0]

    def delay(self, now: float) -> float:
        """Seconds from ``now`` until a transfer that isn't urgent may begin, if nothing else does."""
        share = self._share()
        self._settle(now, share)
        if share <= 0.0:
            return float("inf")
        return max(0.0, *self._debts) / share

    def pay(self, nbytes: int, now: float, seconds: float = 0.0) -> None:
        """Account for a transfer of ``nbytes`` that begins at ``now`` and takes the link for ``seconds``."""
        busy = self.busy()
        self._settle(now, 1.0 - self.reservation if busy else 1.0)
        if self.bytes_per_second:
            self._debts[0] += nbytes / self.bytes_per_second
        if self.operations_per_second:
            self._debts[1] += 1.0 / self.operations_per_second
        if busy and self.reservation:
            self._debts[2] = max(0.0, self._debts[2]) + seconds

    def _settle(self, now: float, share: float) -> None:
        if self._last is not None and now > self._last:
            earned = (now - self._last) * share
            self._debts = [max(-self.burst, debt - earned) for debt in self._debts]
        self._last = now if self._last is None else max(now, self._last)

    def _share(self) -> float:
        return 1.0 - self.reservation if self.busy() else 1.0
