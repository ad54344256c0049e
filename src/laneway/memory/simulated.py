"""A tier that takes the time it is told: bytes, bandwidth and latency on a clock, with or without real data behind it."""

from __future__ import annotations

import ctypes
from collections import deque
from typing import TYPE_CHECKING

from laneway.core import InputError
from laneway.memory.clock import VirtualClock
from laneway.memory.throttle import Throttle
from laneway.memory.tier import Ended, Slot, Tier, TierFullError, Transfer

if TYPE_CHECKING:
    import torch


class SimulatedTransfer(Transfer):
    """A copy whose data moved at once and whose time passes on the tier's clock."""

    def __init__(self, tier: SimulatedTier, lane: _Lane, nbytes: int, seconds: float, ended: Ended) -> None:
        self.tier, self.lane, self.nbytes, self.seconds, self.ended = tier, lane, nbytes, seconds, ended
        self.submitted = tier.clock.now()
        self.urgent = False
        self.finish: float | None = None

    @property
    def done(self) -> bool:
        """Whether its end was noticed."""
        return self.finish is not None

    def wait(self) -> float:
        """Let the clock run to its end."""
        self.tier.poll()
        if self.done:
            return 0.0
        self.lane.hurry(self)
        start = self.tier.clock.now()
        while not self.done:
            self.tier.clock.advance_to(self.lane.end_of(self))
            self.tier.poll()
        return self.tier.clock.now() - start

    def cancel(self) -> bool:
        """Take it out of the queue; False once it has begun."""
        self.tier.poll()
        return not self.done and self.lane.cancel(self)


class _Lane:
    """One direction of a link (or both, half duplex): one transfer after the other."""

    def __init__(self, clock: VirtualClock, throttle: Throttle | None) -> None:
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
        begin = self._start + self._started.seconds if self._started is not None else max(transfer.submitted, self.free_at)
        return begin + transfer.seconds

    def cancel(self, transfer: SimulatedTransfer) -> bool:
        self._begin_due()
        if transfer is self._started or transfer not in self.queue:
            return False
        self.queue.remove(transfer)
        return True

    def poll(self) -> None:
        now = self.clock.now()
        self._begin_due()
        while self._started is not None and self._start + self._started.seconds <= now:
            ended, self._started = self._started, None
            self.queue.popleft()
            ended.finish = self.free_at = self._start + ended.seconds
            self.busy_seconds += ended.seconds
            self._begin_due()
            ended.ended(None)

    def _begin_due(self) -> None:
        if self._started is not None or not self.queue:
            return
        head, now = self.queue[0], self.clock.now()
        start = max(head.submitted, self.free_at)
        if self.throttle is not None:
            if not head.urgent:
                start += self.throttle.delay(start)
            if start <= now:
                self.throttle.pay(head.nbytes, start)
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
    """

    def __init__(
        self,
        clock: VirtualClock,
        capacity: int,
        write_bandwidth: float,
        read_bandwidth: float,
        latency: float = 0.0,
        duplex: bool = True,
        throttle: Throttle | None = None,
    ) -> None:
        for name, given in (("write_bandwidth", write_bandwidth), ("read_bandwidth", read_bandwidth)):
            if not given > 0:
                raise InputError(name, given, "bytes per second > 0")
        super().__init__("simulated", capacity)
        self.clock, self.write_bandwidth, self.read_bandwidth, self.latency = clock, write_bandwidth, read_bandwidth, latency
        out = _Lane(clock, throttle)
        self._out, self._in = out, _Lane(clock, throttle) if duplex else out
        self._data: dict[int, bytearray] = {}
        self._serial = 0

    @property
    def busy_seconds(self) -> float:
        """Seconds that transfers took so far, all lanes together."""
        return self._out.busy_seconds + (self._in.busy_seconds if self._in is not self._out else 0.0)

    def allocate(self, nbytes: int) -> Slot:
        """Room under a new serial number."""
        if self.used + nbytes > self.capacity:
            raise TierFullError(f"{self.name} tier: {nbytes} bytes don't fit beside {self.used} of {self.capacity}")
        self._took(nbytes)
        self._serial += 1
        return Slot(self._serial, nbytes)

    def release(self, slot: Slot) -> None:
        """Forget the slot and what is in it."""
        self.used -= slot.nbytes
        self._data.pop(slot.offset, None)

    def write(self, slot: Slot, source: torch.UntypedStorage | None, ended: Ended) -> SimulatedTransfer:
        """Take the data now; the time follows."""
        if source is not None:
            data = bytearray(slot.nbytes)
            ctypes.memmove((ctypes.c_char * slot.nbytes).from_buffer(data), source.data_ptr(), slot.nbytes)
            self._data[slot.offset] = data
        self.traffic.bytes_written += slot.nbytes
        self.traffic.writes += 1
        return self._submit(self._out, slot.nbytes, self.write_bandwidth, ended)

    def read(self, slot: Slot, target: torch.UntypedStorage | None, ended: Ended, *, urgent: bool = False) -> SimulatedTransfer:
        """Give the data now; the time follows."""
        if target is not None:
            data = self._data[slot.offset]
            ctypes.memmove(target.data_ptr(), (ctypes.c_char * slot.nbytes).from_buffer(data), slot.nbytes)
        self.traffic.bytes_read += slot.nbytes
        self.traffic.reads += 1
        transfer = self._submit(self._in, slot.nbytes, self.read_bandwidth, ended)
        if urgent:
            self._in.hurry(transfer)
        return transfer

    def poll(self) -> None:
        """Notice what has ended by the clock's time."""
        self._out.poll()
        if self._in is not self._out:
            self._in.poll()

    def bandwidth(self) -> tuple[float, float]:
        """As configured."""
        return self.write_bandwidth, self.read_bandwidth

    def close(self) -> None:
        """Forget everything."""
        self._data.clear()
        self._out.queue.clear()
        self._in.queue.clear()

    def _submit(self, lane: _Lane, nbytes: int, bandwidth: float, ended: Ended) -> SimulatedTransfer:
        transfer = SimulatedTransfer(self, lane, nbytes, self.latency + nbytes / bandwidth, ended)
        lane.submit(transfer)
        return transfer
