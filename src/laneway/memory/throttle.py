"""A cap on what transfers may take of a link: bytes and operations per second, and less while a collective is in flight."""

from __future__ import annotations

from collections.abc import Callable


class Throttle:
    """Two token buckets of one second's depth at most ``burst`` seconds; what goes ahead unasked is paid back later.

    Args:
        bytes_per_second, operations_per_second: the caps; 0: none.
        reservation: share of the rates that is taken away while ``busy()`` says a collective is in flight, 0 to 1.
        busy: whether one is.
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
        self._last: float | None = None
        self._debt = 0.0  # seconds of the link at its full allowance that were used in advance; negative: saved up

    def delay(self, now: float) -> float:
        """Seconds from ``now`` until a transfer that isn't urgent may begin, if nothing else does."""
        self._settle(now)
        share = self._share()
        if self._debt <= 0.0:
            return 0.0
        return self._debt / share if share > 0.0 else float("inf")

    def pay(self, nbytes: int, now: float) -> None:
        """Account for a transfer of ``nbytes`` that begins at ``now``."""
        self._settle(now)
        cost = nbytes / self.bytes_per_second if self.bytes_per_second else 0.0
        if self.operations_per_second:
            cost = max(cost, 1.0 / self.operations_per_second)
        self._debt += cost

    def _settle(self, now: float) -> None:
        if self._last is not None and now > self._last:
            self._debt = max(-self.burst, self._debt - (now - self._last) * self._share())
        self._last = now if self._last is None else max(now, self._last)

    def _share(self) -> float:
        return 1.0 - self.reservation if self.busy() else 1.0
