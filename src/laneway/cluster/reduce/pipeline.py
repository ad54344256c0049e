"""Stages that pieces go through one after the other, each stage a thread of its own: while one piece is on the outer level, the
next one is on the inner level.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from laneway.core import LanewayError

__all__ = ["Pipeline"]

Call = Callable[[], None]
Done = Callable[[BaseException | None], None]
Item = tuple[Sequence[Call], Done, list[BaseException]]


class Pipeline:
    """First in, first out at every stage, so that all ranks use each group in the same order.

    Threads start with the first piece that is submitted.

    Args:
        names: of the stages.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._queues: list[SimpleQueue[Item | None]] = [SimpleQueue() for _ in names]
        self._threads: list[threading.Thread] = []
        self._order, self._count = threading.Lock(), threading.Lock()
        self._under_way = 0
        self.closed = False

    def submit(self, calls: Sequence[Call], done: Done) -> None:
        """Send a piece on its way: `calls[stage]` runs in that stage's thread, then `done(error)` in the last one's.

        After a call that raises, the piece's later calls are left out.

        Raises:
            LanewayError: the pipeline is closed.
        """
        with self._order:
            self._check_open()
            if not self._threads:
                self._start()
            with self._count:
                self._under_way += 1
            self._queues[0].put((calls, done, []))

    def run(self, calls: Sequence[Call]) -> bool:
        """Run a piece's calls in this thread if no other piece is under way; returns whether it did.

        Raises:
            LanewayError: the pipeline is closed.
        """
        with self._order:
            self._check_open()
            if self._under_way:
                return False
            for call in calls:
                call()
            return True

    def close(self, *, wait: bool = True) -> None:
        """Let what is under way end, and end the threads; `wait` for it."""
        with self._order:
            self.closed = True
            threads, self._threads = self._threads, []
            if threads:
                self._queues[0].put(None)
        for thread in threads if wait else ():
            thread.join()

    def _check_open(self) -> None:
        if self.closed:
            raise LanewayError("the reducer is closed")

    def _start(self) -> None:
        for stage, name in enumerate(self._names):
            thread = threading.Thread(target=self._work, args=(stage,), name=f"laneway {name}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _work(self, stage: int) -> None:
        last = stage + 1 == len(self._queues)
        while True:
            item = self._queues[stage].get()
            if item is None:
                if not last:
                    self._queues[stage + 1].put(None)
                return
            calls, done, errors = item
            if not errors:
                try:
                    calls[stage]()
                except BaseException as error:  # noqa: BLE001 - whoever waits for the piece gets it
                    errors.append(error)
            if not last:
                self._queues[stage + 1].put(item)
                continue
            with self._count:
                self._under_way -= 1
            done(errors[0] if errors else None)
            del item, calls, done, errors
