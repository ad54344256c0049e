"""A tier that takes the time it is told: bytes, bandwidth and latency on a clock, with or without real data behind it."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from laneway.core import InputError, LanewayError, positive_int
from laneway.memory.clock import MovedClock
from laneway.memory.throttle import Throttle
from laneway.memory.tier import Ended, Slot, Tier, TierFullError, Transfer

if TYPE_CHECKING:
    import torch


class SimulatedTransfer(Transfer):
    """A copy whose data moved at once and whose time passes on the tier's clock."""

    def __init__(self, tier: SimulatedTier, lane: _Lane, slot: Slot, seconds: float, ended: Ended, writes: bool) -> None:
        self.tier, self.lane, self.slot, self.seconds, self.ended, self.writes = tier, lane, slot, seconds, ended, writes
        self.nbytes = slot.nbytes
        self.after = tier.last_of(slot)
        self.submitted = tier.clock.now()
        self.urgent = self.cancelled = False
        self.finish: float | None = None
        self.error: LanewayError | None = None

    @property
    def done(self) -> bool:
        """Whether its end was noticed."""
        return self.finish is not None

    def wait(self) -> float:
        """Let the clock run to its end."""
        start = self.tier.clock.now()
        self.tier.poll()
        if not self.done and not self.cancelled:
            if self.after is not None and not self.after.done and not self.after.cancelled:
                self.after.wait()
            self.lane.hurry(self)
            while not self.done:
                self.tier.clock.advance_to(self.lane.end_of(self))
                self.tier.poll()
        if self.cancelled:
            raise LanewayError("a transfer that was cancelled can't be waited for")
        if self.error is not None:
            raise self.error
        return self.tier.clock.now() - start

    def cancel(self) -> bool:
        """Take it out of the queue; False once it has begun."""
        self.tier.poll()
        if self.done or self.cancelled or not self.lane.cancel(self):
            return False
        self.cancelled = True
        self.tier.cancelled(self)
        return True

    def earliest(self) -> float | None:
        """When it may begin as far as its slot goes; None while the transfer before it in the slot has not ended."""
        if self.after is None or self.after.cancelled:
            return self.submitted
        return None if self.after.finish is None else max(self.submitted, self.after.finish)


class _Lane:
    """One direction of a link (or both, half duplex): one transfer after the other."""

    def __init__(self, clock: MovedClock, throttle: Throttle | None) -> None:
        self.clock, self.throttle = clock, throttle
        self.queue: deque[SimulatedTransfer] = deque()
        self.free_at = 0.0
        self.busy_seconds = 0.0
        self._started: SimulatedTransfer | None = None
        self._start = 0.0

    def submit(self, transfer: SimulatedTransfer) -> None:
        self._begin_due()
        self.queue.append(transfer)
        self._begin_due()

    def hurry(self, transfer: SimulatedTransfer) -> None:
        """Move a waiting transfer to the head of those that wait, and let it begin without asking the throttle."""
        self._begin_due()
        if transfer is self._started or transfer not in self.queue:
            return
        self.queue.remove(transfer)
        transfer.urgent, transfer.submitted = True, self.clock.now()
        self.queue.insert(1 if self._started is not None else 0, transfer)
        self._begin_due()

    def end_of(self, transfer: SimulatedTransfer) -> float:
        """When the head, or the one right behind it, will have ended."""
        if transfer is self._started:
            return self._start + transfer.seconds
        if self._started is not None:
            return self._start + self._started.seconds + transfer.seconds
        return max(transfer.earliest() or 0.0, self.free_at) + transfer.seconds

    def cancel(self, transfer: SimulatedTransfer) -> bool:
        self._begin_due()
        if transfer is self._started or transfer not in self.queue:
            return False
        self.queue.remove(transfer)
        return True

    def next_end(self) -> float | None:
        """When what is under way will have ended."""
        self._begin_due()
        return None if self._started is None else self._start + self._started.seconds

    def end_next(self) -> SimulatedTransfer:
        """End what is under way, at its time."""
        ended = self._started
        assert ended is not None
        self._started = None
        self.queue.remove(ended)
        ended.finish = self.free_at = self._start + ended.seconds
        self.busy_seconds += ended.seconds
        self._begin_due()
        return ended

    def _begin_due(self) -> None:
        if self._started is not None or not self.queue:
            return
        head, now = self.queue[0], self.clock.now()
        earliest = head.earliest()
        if earliest is None:
            return
        start = max(earliest, self.free_at)
        if self.throttle is not None:
            if not head.urgent:
                start += self.throttle.delay(start)
            if start <= now:
                self.throttle.pay(head.nbytes, start, head.seconds)
        if start <= now:
            self._started, self._start = head, start


class SimulatedTier(Tier):
    """Memory behind a link of given speed, on a virtual clock.

    Args:
        clock: waits advance it.
        capacity: bytes.
        write_bandwidth, read_bandwidth: bytes per second.
        latency: seconds each transfer takes on top.
        duplex: writes and reads don't wait for each other.
        throttle: caps what isn't urgent.
        copying: entered while data is copied, which takes real time that the clock may have to leave out.
    """

    def __init__(
        self,
        clock: MovedClock,
        capacity: int,
        write_bandwidth: float,
        read_bandwidth: float,
        latency: float = 0.0,
        duplex: bool = True,
        throttle: Throttle | None = None,
        copying: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        for name, given in (("write_bandwidth", write_bandwidth), ("read_bandwidth", read_bandwidth)):
            if not given > 0:
                raise InputError(name, given, "bytes per second > 0")
        super().__init__("simulated", capacity)
        self.clock, self.write_bandwidth, self.read_bandwidth, self.latency = clock, write_bandwidth, read_bandwidth, latency
        self.copying = copying
        out = _Lane(clock, throttle)
        self._out, self._in = out, _Lane(clock, throttle) if duplex else out
        self._data: dict[int, bytearray] = {}
        self._pending: dict[int, list[SimulatedTransfer]] = {}
        self._released: dict[int, Slot] = {}
        self._serial = 0
        self._closed = False

    @property
    def busy_seconds(self) -> float:
        """Seconds that transfers took so far, all lanes together."""
        return self._out.busy_seconds + (self._in.busy_seconds if self._in is not self._out else 0.0)

    def allocate(self, nbytes: int) -> Slot:
        """Room under a new serial number."""
        self._require_open()
        positive_int("nbytes", nbytes)
        if self.used + nbytes > self.capacity:
            raise TierFullError(f"{self.name} tier: {nbytes} bytes don't fit beside {self.used} of {self.capacity}")
        self._took(nbytes)
        self._serial += 1
        self._pending[self._serial] = []
        return Slot(self._serial, nbytes)

    def release(self, slot: Slot) -> None:
        """Forget the slot and what is in it, once its transfers have ended."""
        if self._closed:
            return
        if slot.offset not in self._pending or slot.offset in self._released:
            raise LanewayError(f"{self.name} tier: slot {slot.offset} was released before")
        self._released[slot.offset] = slot
        self._forget_released(slot)

    def write(self, slot: Slot, source: torch.UntypedStorage | None, ended: Ended) -> SimulatedTransfer:
        """Take the data now; the time follows."""
        transfer = self._transfer(self._out, slot, self.write_bandwidth, ended, writes=True)
        if source is not None:
            with self.copying():
                data = bytearray(slot.nbytes)
                ctypes.memmove((ctypes.c_char * slot.nbytes).from_buffer(data), source.data_ptr(), slot.nbytes)
            self._data[slot.offset] = data
        self.traffic.bytes_written += slot.nbytes
        self.traffic.writes += 1
        self._out.submit(transfer)
        return transfer

    def read(self, slot: Slot, target: torch.UntypedStorage | None, ended: Ended, *, urgent: bool = False) -> SimulatedTransfer:
        """Give the data now; the time follows."""
        transfer = self._transfer(self._in, slot, self.read_bandwidth, ended, writes=False)
        if target is not None:
            with self.copying():
                data = self._data[slot.offset]
                ctypes.memmove(target.data_ptr(), (ctypes.c_char * slot.nbytes).from_buffer(data), slot.nbytes)
        self.traffic.bytes_read += slot.nbytes
        self.traffic.reads += 1
        self._in.submit(transfer)
        if urgent:
            for waiting in reversed(self._pending[slot.offset]):  # what it waits for goes ahead of it
                waiting.lane.hurry(waiting)
        return transfer

    def poll(self) -> None:
        """Notice what has ended by the clock's time, in the order in which it ended."""
        lanes = (self._out,) if self._in is self._out else (self._out, self._in)
        while True:
            ends = [(end, lane) for lane in lanes if (end := lane.next_end()) is not None and end <= self.clock.now()]
            if not ends:
                return
            transfer = min(ends, key=lambda pair: pair[0])[1].end_next()
            self._settled(transfer)
            transfer.ended(None)

    def bandwidth(self) -> tuple[float, float]:
        """As configured."""
        return self.write_bandwidth, self.read_bandwidth

    def close(self) -> None:
        """End what is queued with an error, and forget everything."""
        self.poll()
        self._closed = True
        left = list(dict.fromkeys([*self._out.queue, *self._in.queue]))
        for lane in (self._out, self._in):
            lane.queue.clear()
            lane._started = None
        for transfer in left:
            transfer.finish, transfer.error = self.clock.now(), LanewayError(f"{self.name} tier: closed before a transfer ended")
        self._data.clear()
        self._pending.clear()
        self._released.clear()
        self.used = 0
        for transfer in left:
            transfer.ended(transfer.error)

    def last_of(self, slot: Slot) -> SimulatedTransfer | None:
        """The transfer of ``slot`` submitted last, if it has not ended: the next one of this slot begins after it."""
        pending = self._pending[slot.offset]
        return pending[-1] if pending else None

    def cancelled(self, transfer: SimulatedTransfer) -> None:
        """Take back what was done ahead for a transfer that won't be."""
        if transfer.writes:
            self.traffic.bytes_written -= transfer.nbytes
            self.traffic.writes -= 1
            self._data.pop(transfer.slot.offset, None)
        else:
            self.traffic.bytes_read -= transfer.nbytes
            self.traffic.reads -= 1
        self._settled(transfer)

    def _transfer(self, lane: _Lane, slot: Slot, bandwidth: float, ended: Ended, writes: bool) -> SimulatedTransfer:
        self._require_open()
        if slot.offset not in self._pending or slot.offset in self._released:
            raise LanewayError(f"{self.name} tier: slot {slot.offset} isn't allocated")
        transfer = SimulatedTransfer(self, lane, slot, self.latency + slot.nbytes / bandwidth, ended, writes)
        self._pending[slot.offset].append(transfer)
        return transfer

    def _settled(self, transfer: SimulatedTransfer) -> None:
        pending = self._pending.get(transfer.slot.offset)
        if pending is not None:
            pending.remove(transfer)
            transfer.after = None if transfer.done else transfer.after
            self._forget_released(transfer.slot)

    def _forget_released(self, slot: Slot) -> None:
        if slot.offset in self._released and not self._pending[slot.offset]:
            del self._released[slot.offset], self._pending[slot.offset]
            self._data.pop(slot.offset, None)
            self.used -= slot.nbytes

    def _require_open(self) -> None:
        if self._closed:
            raise LanewayError(f"{self.name} tier: it is closed")
