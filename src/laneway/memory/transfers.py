"""Copies that wait in a queue for each direction until its thread makes them.

Copies run on the threads; what a caller sees of them (``done``, ``Ended``) changes only in ``poll`` and ``wait``, on its own
thread.
Transfers of one slot run in the order in which they were submitted, so a read never overtakes the write that it is about.
"""

from __future__ import annotations

import os
import threading
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import Literal

from laneway.core import LanewayError
from laneway.memory.clock import WallClock
from laneway.memory.throttle import Throttle
from laneway.memory.tier import Ended, Slot, Traffic, Transfer

Direction = Literal["write", "read"]
LONGEST_NAP = 0.02  # seconds between two looks at a throttle that says "not yet"


class Stage(Enum):
    """How far a transfer is."""

    QUEUED = "queued"
    RUNNING = "running"
    FINISHED = "finished"
    CANCELLED = "cancelled"


class Room:
    """The books of one slot."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.pending: list[QueuedTransfer] = []
        self.filled = self.released = False


class QueuedTransfer(Transfer):
    """A copy that a thread of the tier makes."""

    def __init__(self, queue: TransferQueue, room: Room, direction: Direction, work: Callable[[], None], ended: Ended) -> None:
        self.queue, self.room, self.direction, self.ended = queue, room, direction, ended
        self.work: Callable[[], None] | None = work
        self.nbytes = room.slot.nbytes
        self.stage = Stage.QUEUED
        self.urgent = self.noticed = False
        self.error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether its end was noticed."""
        return self.noticed

    def wait(self) -> float:
        """Block until it has ended; seconds of the wall clock.

        Raises:
            LanewayError: it was cancelled.
            Exception: what went wrong with the copy.
        """
        return self.queue.wait(self)

    def cancel(self) -> bool:
        """Take it out of the queue; False once it has begun."""
        return self.queue.cancel(self)


class Rate:
    """Bytes per second, the recent bytes counting most: what was moved ``MEMORY`` bytes ago counts half."""

    MEMORY = 64 << 20

    def __init__(self) -> None:
        self.nbytes = self.seconds = 0.0

    def add(self, nbytes: int, seconds: float) -> None:
        """Account for a copy."""
        keep = 0.5 ** (nbytes / self.MEMORY)
        self.nbytes, self.seconds = self.nbytes * keep + nbytes, self.seconds * keep + max(seconds, 1e-9)

    def per_second(self) -> float:
        """Bytes per second; 0.0 before the first copy."""
        return self.nbytes / self.seconds if self.seconds else 0.0


class TransferQueue:
    """Two queues, each with a thread of its own that makes one copy after the other.

    Args:
        name: the tier's, for messages.
        settled: called under the lock when a transfer has left the books of its slot (ended or cancelled).
    """

    def __init__(self, name: str, settled: Callable[[Room], None]) -> None:
        self.name, self.settled = name, settled
        self.clock = WallClock()
        self.throttle: Throttle | None = None
        self.lock = threading.RLock()
        self.rates: dict[Direction, Rate] = {"write": Rate(), "read": Rate()}
        self.traffic = Traffic()
        self.closed = False
        self._changed = threading.Condition(self.lock)
        self._noticing = threading.RLock()
        self._waiting: dict[Direction, deque[QueuedTransfer]] = {"write": deque(), "read": deque()}
        self._ended: deque[QueuedTransfer] = deque()
        self._threads: dict[Direction, threading.Thread] = {}
        self._process = os.getpid()

    def submit(self, transfer: QueuedTransfer, urgent: bool = False) -> None:
        """Queue a transfer behind those of its direction, or ahead of all."""
        self._require_process()
        with self.lock:
            self.require_open()
            transfer.room.pending.append(transfer)
            self._waiting[transfer.direction].append(transfer)
            if urgent:
                self._hurry(transfer)
            if transfer.direction not in self._threads:
                thread = threading.Thread(
                    target=self._serve, args=(transfer.direction,), name=f"{self.name} tier: {transfer.direction}s", daemon=True
                )
                self._threads[transfer.direction] = thread
                thread.start()
            self._changed.notify_all()

    def wait(self, transfer: QueuedTransfer) -> float:
        """Let it go ahead, block until it has ended, and notice that."""
        start = self.clock.now()
        self._require_process()
        with self.lock:
            if transfer.stage is Stage.QUEUED:
                self._hurry(transfer)
                self._changed.notify_all()
            while transfer.stage in (Stage.QUEUED, Stage.RUNNING):
                self._require_process()
                self._changed.wait(timeout=1.0)
        if transfer.stage is Stage.CANCELLED:
            raise LanewayError("a transfer that was cancelled can't be waited for")
        noticed = transfer.noticed
        self.poll()
        if transfer.error is not None:
            raise transfer.error
        return 0.0 if noticed else self.clock.now() - start

    def cancel(self, transfer: QueuedTransfer) -> bool:
        """Take it out if it has not begun."""
        with self.lock:
            if transfer.stage is not Stage.QUEUED:
                return False
            self._waiting[transfer.direction].remove(transfer)
            self._leave(transfer, Stage.CANCELLED)
            return True

    def poll(self) -> None:
        """Call ``Ended`` of what has ended, in the order in which it did."""
        with self._noticing:
            while self._ended:
                transfer = self._ended.popleft()
                transfer.noticed = True
                transfer.ended(transfer.error)

    def close(self) -> None:
        """Fail what is queued, let what runs end, and end the threads."""
        self.stop()
        if os.getpid() == self._process:
            for thread in self._threads.values():
                if thread is not threading.current_thread():
                    thread.join()

    def stop(self) -> None:
        """Fail what is queued; the threads end by themselves."""
        with self.lock:
            if self.closed:
                return
            self.closed = True
            for waiting in self._waiting.values():
                while waiting:
                    self._fail(waiting.popleft(), LanewayError(f"{self.name} tier: closed before a transfer had begun"))
            self._changed.notify_all()

    def forget_rates(self) -> None:
        """Measure afresh from the next copy on."""
        with self.lock:
            self.rates = {"write": Rate(), "read": Rate()}

    def require_open(self) -> None:
        """Raise where the tier was closed, or belongs to the process that this one was forked from."""
        if self.closed:
            raise LanewayError(f"{self.name} tier: it is closed")
        self._require_process()

    def _require_process(self) -> None:
        if os.getpid() != self._process:
            raise LanewayError(
                f"{self.name} tier: it belongs to process {self._process}; a forked process needs a tier of its own"
            )

    # -- on the threads

    def _serve(self, direction: Direction) -> None:
        while (transfer := self._next(direction)) is not None:
            start, error = self.clock.now(), None
            work, transfer.work = transfer.work, None
            try:
                assert work is not None
                with self._shared():
                    work()
            except BaseException as failure:  # noqa: BLE001  it is handed to whoever waits
                traceback.clear_frames(failure.__traceback__)  # they hold the storage
                error = failure
            del work
            seconds = self.clock.now() - start
            with self.lock:
                if error is None:
                    self._count(transfer, seconds)
                    self._leave(transfer, Stage.FINISHED)
                else:
                    self._fail(transfer, error)
            del transfer, error

    def _next(self, direction: Direction) -> QueuedTransfer | None:
        """The next transfer to run; waits for one, and for the throttle. None: the queue was closed."""
        with self.lock:
            while not self.closed:
                transfer = next((t for t in self._waiting[direction] if t.room.pending[0] is t), None)
                delay = None
                if transfer is not None:
                    try:
                        delay = self._delay(transfer)
                    except BaseException as error:  # noqa: BLE001  a fault of the throttle is one of the transfer
                        self._waiting[direction].remove(transfer)
                        self._fail(transfer, error)
                        continue
                    if delay <= 0.0:
                        self._waiting[direction].remove(transfer)
                        transfer.stage = Stage.RUNNING
                        return transfer
                self._nap(delay)
            return None

    def _shared(self) -> AbstractContextManager[None]:
        sharing = self.throttle.sharing if self.throttle is not None else None
        return nullcontext() if sharing is None else sharing.transfer()

    def _nap(self, delay: float | None) -> None:
        """Wait for a change, or until the throttle is to be looked at again."""
        sharing = self.throttle.sharing if self.throttle is not None and delay is not None else None
        start, held = self.clock.now(), sharing is not None and sharing()
        self._changed.wait(None if delay is None else min(delay, LONGEST_NAP))
        if sharing is not None and held:
            sharing.held(self.clock.now() - start)

    def _delay(self, transfer: QueuedTransfer) -> float:
        if self.throttle is None:
            return 0.0
        now = self.clock.now()
        delay = 0.0 if transfer.urgent else self.throttle.delay(now)
        if delay <= 0.0:
            rate = self.rates[transfer.direction].per_second()
            self.throttle.pay(transfer.nbytes, now, transfer.nbytes / rate if rate else 0.0)
        return delay

    # -- under the lock

    def _hurry(self, transfer: QueuedTransfer) -> None:
        """Move it, and those of its slot that it has to wait for, ahead of all that is queued."""
        before = transfer.room.pending[: transfer.room.pending.index(transfer) + 1]
        for each in reversed(before):
            each.urgent = True
            if each.stage is Stage.QUEUED:
                waiting = self._waiting[each.direction]
                waiting.remove(each)
                waiting.appendleft(each)

    def _count(self, transfer: QueuedTransfer, seconds: float) -> None:
        self.rates[transfer.direction].add(transfer.nbytes, seconds)
        if transfer.direction == "write":
            transfer.room.filled = True
            self.traffic.bytes_written += transfer.nbytes
            self.traffic.writes += 1
        else:
            self.traffic.bytes_read += transfer.nbytes
            self.traffic.reads += 1

    def _fail(self, transfer: QueuedTransfer, error: BaseException) -> None:
        transfer.error = error
        if transfer.direction == "write":
            transfer.room.filled = False
        self._leave(transfer, Stage.FINISHED)

    def _leave(self, transfer: QueuedTransfer, stage: Stage) -> None:
        transfer.stage, transfer.work = stage, None
        transfer.room.pending.remove(transfer)
        if stage is Stage.FINISHED:
            self._ended.append(transfer)
        self.settled(transfer.room)
        self._changed.notify_all()
