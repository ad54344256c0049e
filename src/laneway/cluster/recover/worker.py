"""A thread that does one call after the other and can be left behind in one that never returns."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Worker"]


class Worker:
    """Calls run in the order they are given. It has the device and the number of threads of the thread that made it."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Callable[[Any, BaseException | None], None]] | None]
        self._calls = queue.SimpleQueue()
        self._threads = torch.get_num_threads()
        self._device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None
        threading.Thread(target=self._run, name="laneway-watched", daemon=True).start()

    def give(self, call: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        """Queue ``call``; its result or its exception goes to ``done``, in the worker's thread."""
        self._calls.put((call, done))

    def close(self) -> None:
        """End the thread once it has done what it has."""
        self._calls.put(None)

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        if self._device is not None:
            torch.accelerator.set_device_index(self._device)
        while (item := self._calls.get()) is not None:
            call, done = item
            try:
                result = call()
            except BaseException as error:  # noqa: BLE001 - it is raised again in the thread that waits
                done(None, error)
            else:
                done(result, None)
            del item, call, done
