"""What an asynchronous reduction gives back, what a failed one raises, and what an observer is told."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from laneway.core import LanewayError

__all__ = ["FLAT_LEVEL", "Observer", "ReductionError", "Timing", "Work"]

FLAT_LEVEL = -1


@dataclass(frozen=True)
class Timing:
    """One phase of one piece of a reduction, as one rank saw it.

    Attributes:
        level: index of the level, innermost 0; -1 for a collective over all ranks at once.
        phase: "up", "top", "down" or "flat".
        nbytes: bytes that this rank sent.
        seconds: how long it took, with the wait for slower members.
        started: when, by `time.perf_counter()`.
    """

    level: int
    phase: str
    nbytes: int
    seconds: float
    started: float


Observer = Callable[[Timing], object]
"""Called after each phase, in the thread that ran it: brief, and without any collective of its own."""


class ReductionError(LanewayError):
    """A collective that failed: which one, among whom, and why. The groups can't be used any more."""


class Work:
    """A reduction under way.

    Args:
        result: what it gives in the end.
        pieces: how many parts of it have to finish.
        finish: called once, after the last of them.
    """

    def __init__(self, result: Tensor, pieces: int, finish: Callable[[], object] | None = None) -> None:
        self._result, self._left, self._finish = result, pieces, finish
        self._error: BaseException | None = None
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._future: torch.futures.Future[Tensor] | None = None
        if pieces == 0:
            self._left = 1
            self.piece_done(None)

    def wait(self, timeout: float | None = None) -> Tensor:
        """Block until it is done; returns the result.

        Args:
            timeout: seconds; None: as long as the groups' own timeout lets it take.

        Raises:
            ReductionError: a collective failed.
            TimeoutError: it isn't done yet.
        """
        if not self._ended.wait(timeout):
            raise TimeoutError(f"the reduction isn't done after {timeout} s")
        if self._error is not None:
            raise self._error
        return self._result

    def done(self) -> bool:
        """Whether it ended, well or badly."""
        return self._ended.is_set()

    def exception(self) -> BaseException | None:
        """What it failed with; None where it succeeded or isn't done."""
        return self._error

    def future(self) -> torch.futures.Future[Tensor]:
        """A future of the result, as DistributedDataParallel's communication hooks return it. The same one at each call."""
        with self._lock:
            if self._future is None:
                device = self._result.device
                self._future = torch.futures.Future(devices=None if device.type == "cpu" else [device])
                if self._ended.is_set():
                    self._settle()
            return self._future

    def piece_done(self, error: BaseException | None) -> None:
        """One of its parts ended. Called by who runs it. The first error ends the whole, whatever else is still under way."""
        with self._lock:
            self._left -= 1
            if self._ended.is_set() or (self._left and error is None):
                return
        if error is None and self._finish is not None:
            try:
                self._finish()
            except Exception as failure:  # noqa: BLE001 - whoever waits gets it
                error = failure
        with self._lock:
            self._error = error
            self._ended.set()
            future = self._future
        if future is not None:
            self._settle()

    def _settle(self) -> None:
        assert self._future is not None
        if self._error is not None:
            self._future.set_exception(self._error)  # type: ignore[arg-type]
        else:
            self._future.set_result(self._result)
