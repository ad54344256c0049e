"""Progress of long work on standard error: a bar on a terminal, plain lines elsewhere, nothing for what is soon over."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

QUIET_S = 2.0  # work that is shorter says nothing
LINE_S = 10.0  # between two plain lines


class ByteProgress:
    """Counts bytes of work towards ``total``; a context manager.

    Args:
        label: what is being done, for the reader ("tokenising stdlib").
        total: bytes in all; the bar never goes beyond it.
        stream: where to write; standard error by default.
        clock: seconds; replaceable so that tests need not wait.
    """

    def __init__(self, label: str, total: int, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.label, self.total, self.done = label, max(total, 1), 0
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._began = clock()
        self._next = self._began + QUIET_S
        self._bar: Progress | None = None
        self._spoke = False

    def __enter__(self) -> ByteProgress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._spoke and kind is None:
            self._line(f"done in {self._clock() - self._began:.0f} s")

    def advance(self, amount: int) -> None:
        """Add ``amount`` bytes of finished work, and show it if it is time to."""
        self.done = min(self.done + amount, self.total)
        now = self._clock()
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self.done)
        elif now >= self._next:
            self._next = now + LINE_S
            if self._stream.isatty():
                self._start_bar()
            else:
                left = (now - self._began) * (self.total - self.done) / max(self.done, 1)
                self._line(f"{100 * self.done / self.total:.0f} %, about {left:.0f} s left")

    def _start_bar(self) -> None:
        columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
        self._bar = Progress(*columns, console=Console(file=self._stream), transient=True)
        self._bar.add_task(self.label, total=self.total, completed=self.done)
        self._bar.start()

    def _line(self, text: str) -> None:
        self._spoke = True
        print(f"{self.label}: {text}", file=self._stream, flush=True)


def say(text: str) -> None:
    """One line on standard error."""
    print(text, file=sys.stderr, flush=True)
