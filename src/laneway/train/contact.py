"""A run whose ranks lose each other ends on all of them, with one line that says who: torchrun then starts it again."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

from laneway.cluster.recover import CollectiveFailedError, LostContactError, Watch, leave
from laneway.core import LanewayError


class Contact:
    """A run's watch over its ranks.

    A rank that is told of a loss while it waits in a collective can't be woken; where it has not come out by itself a moment
    later, its process ends here.
    """

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.note: Callable[[LostContactError], object] | None = None
        self._knows = threading.Event()
        watch.on_failure(lambda failure: threading.Thread(target=self._end, args=(failure,), daemon=True).start())

    def explain(self, error: BaseException) -> BaseException:
        """What to raise in place of ``error``: the loss that it comes from, or ``error`` itself."""
        self._knows.set()
        if not isinstance(error, Exception) or isinstance(error, LostContactError):
            return error
        found = self.watch.explain(error)
        own = isinstance(error, LanewayError) and isinstance(found, CollectiveFailedError)
        return error if own else found  # all ranks raise such errors alike, each its own

    def end(self) -> bool:
        """Stop watching; returns whether contact was lost."""
        self._knows.set()
        self.watch.close()
        return self.watch.failure is not None

    def _end(self, failure: LostContactError) -> None:
        if failure.speaks and self.note is not None:
            self.note(failure)
        if not self._knows.wait(min(1.0, self.watch.limits.limit / 4)):
            if failure.speaks:
                print(f"laneway train: {failure}", file=sys.stderr)
            leave(failure.exit_code)
