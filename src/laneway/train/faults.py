"""What may go wrong in a run and must not lose it: a signal that ends it, and numbers that are no numbers."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from laneway.core import LanewayError


class StopRequest:
    """Remembers that SIGTERM or SIGINT came; the loop looks at it at the end of each step.

    The first signal asks; a second one of the same kind does what it would have done without us.
    """

    def __init__(self) -> None:
        self.name: str | None = None

    @contextmanager
    def listening(self) -> Generator[StopRequest]:
        """Handle the two signals inside the block; before and after, they do what they did.

        Python tells signals to the main thread alone: in another one this listens to nothing.
        """
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

        def remember(number: int, frame: FrameType | None) -> None:
            self.name = signal.Signals(number).name
            signal.signal(number, before[signal.Signals(number)])

        for number in before:
            signal.signal(number, remember)
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@dataclass
class NonfiniteGuard:
    """Counts the steps in a row whose loss or gradient was not finite.

    Every rank feeds it the same reduced numbers, so every rank decides the same.
    """

    limit: int
    in_a_row: int = 0

    def see(self, finite: bool) -> None:
        """Take note of one step."""
        self.in_a_row = 0 if finite else self.in_a_row + 1

    @property
    def healthy(self) -> bool:
        """Whether the last step was finite: only then is the state worth a checkpoint."""
        return self.in_a_row == 0

    @property
    def exhausted(self) -> bool:
        """Whether the run should stop."""
        return self.in_a_row >= self.limit

    def error(self, step: int, last_good: int | None) -> LanewayError:
        """What to tell the user when the run stops."""
        kept = "no checkpoint had been written" if last_good is None else f"the checkpoint of step {last_good} is kept"
        return LanewayError(
            f"stopped at step {step}: the loss or the gradient was not finite in {self.in_a_row} steps in a row; {kept}; "
            "try a lower optimizer.lr or optimizer.clip_norm, or precision fp32"
        )
