"""What tiers that copy real bytes share: the books of the slots, and a queue of copies."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

from laneway.core import InputError, LanewayError, positive_int
from laneway.memory.throttle import Throttle
from laneway.memory.tier import Ended, Slot, Tier, TierFullError
from laneway.memory.transfers import Direction, QueuedTransfer, Room, TransferQueue

if TYPE_CHECKING:
    import torch

PROBE_BYTES, PROBES = 4 << 20, 3


class QueuedTier(Tier):
    """A tier with a ``TransferQueue``; what is below says where the bytes are and how they are copied.

    A class that derives from it calls ``_begin`` at the end of its ``__init__``.
    """

    def __init__(self, name: str, capacity: int) -> None:
        super().__init__(name, positive_int("capacity", capacity))
        rooms: dict[int, Room] = {}
        self._rooms = rooms
        tier = weakref.ref(self)

        def settled(room: Room) -> None:
            if room.released and not room.pending and rooms.pop(room.slot.offset, None) is not None:
                alive = tier()
                if alive is not None:
                    alive.used -= room.slot.nbytes
                    alive._give(room.slot)

        self._queue = TransferQueue(name, settled)
        self.traffic = self._queue.traffic
        self._finalizer = weakref.finalize(self, self._queue.stop)

    @abstractmethod
    def _take(self, nbytes: int) -> int | None:
        """Room for ``nbytes``: its offset or serial number; None where there is no hole of that size."""

    @abstractmethod
    def _give(self, slot: Slot) -> None:
        """Undo of ``_take``."""

    @abstractmethod
    def _writing(self, slot: Slot, source: torch.UntypedStorage) -> Callable[[], None]:
        """What copies ``source`` to the slot; made on the caller's thread, run on another."""

    @abstractmethod
    def _reading(self, slot: Slot, target: torch.UntypedStorage) -> Callable[[], None]:
        """What copies the slot to ``target``."""

    @abstractmethod
    def _shut(self) -> None:
        """Give back what the tier itself holds; its transfers have ended. Called once."""

    @property
    def slots(self) -> int:
        """How many slots are held."""
        return len(self._rooms)

    def allocate(self, nbytes: int) -> Slot:
        """Room for ``nbytes`` ≥ 1; TierFullError where there is none."""
        positive_int("nbytes", nbytes)
        with self._queue.lock:
            self._queue.require_open()
            offset = self._take(nbytes) if self.used + nbytes <= self.capacity else None
            if offset is None:
                raise TierFullError(f"{self.name} tier: {nbytes} bytes don't fit beside {self.used} of {self.capacity}")
            self._took(nbytes)
            slot = Slot(offset, nbytes)
            self._rooms[offset] = Room(slot)
            return slot

    def release(self, slot: Slot) -> None:
        """Give the room back, once its transfers have ended. After ``close`` there is nothing left to give."""
        with self._queue.lock:
            if self._queue.closed:
                return
            room = self._room(slot)
            room.released = True
            self._queue.settled(room)

    def write(self, slot: Slot, source: torch.UntypedStorage | None, ended: Ended) -> QueuedTransfer:
        """Queue a copy of ``source`` to the slot."""
        return self._submit(slot, "write", self._checked("source", slot, source), ended, False)

    def read(self, slot: Slot, target: torch.UntypedStorage | None, ended: Ended, *, urgent: bool = False) -> QueuedTransfer:
        """Queue a copy of the slot to ``target``. Its ``wait`` raises where nothing was ever written to the slot."""
        return self._submit(slot, "read", self._checked("target", slot, target), ended, urgent)

    def poll(self) -> None:
        """Call ``Ended`` of what has ended."""
        self._queue.poll()

    def bandwidth(self) -> tuple[float, float]:
        """Bytes per second of writes and of reads: of what was moved lately, at the start of a probe."""
        return self._queue.rates["write"].per_second(), self._queue.rates["read"].per_second()

    def close(self) -> None:
        """End the transfers (those that have not begun with an error) and give everything back."""
        if self._queue.closed:
            return
        self._queue.close()
        self._finalizer.detach()
        with self._queue.lock:
            self._rooms.clear()
            self.used = 0
            self._shut()
        self._queue.poll()

    def _begin(self, device: torch.device, throttle: Throttle | None) -> None:
        """Measure both directions with a few real buffers of ``device``; from then on the throttle holds."""
        import torch

        nbytes = min(PROBE_BYTES, self.capacity)
        try:
            slot = self.allocate(nbytes)
            buffer = torch.zeros(nbytes, dtype=torch.uint8, device=device).untyped_storage()
            for probe in range(PROBES + 1):
                if probe == 1:  # the first one also pays for fresh pages
                    self._queue.forget_rates()
                self.write(slot, buffer, _ignore).wait()
                self.read(slot, buffer, _ignore).wait()
            self.release(slot)
        except BaseException:
            self.close()
            raise
        self.peak = 0
        traffic = self.traffic
        traffic.bytes_written = traffic.bytes_read = traffic.writes = traffic.reads = 0
        self._queue.throttle = throttle

    def _submit(
        self, slot: Slot, direction: Direction, storage: torch.UntypedStorage, ended: Ended, urgent: bool
    ) -> QueuedTransfer:
        with self._queue.lock:
            self._queue.require_open()
            room = self._room(slot)
            work = self._writing(slot, storage) if direction == "write" else _filled(room, self._reading(slot, storage))
            transfer = QueuedTransfer(self._queue, room, direction, work, ended)
            self._queue.submit(transfer, urgent)
            return transfer

    def _room(self, slot: Slot) -> Room:
        room = self._rooms.get(slot.offset)
        if room is None or room.released or room.slot != slot:
            raise LanewayError(f"{self.name} tier: {slot} isn't allocated, or was released")
        return room

    def _checked(self, name: str, slot: Slot, storage: torch.UntypedStorage | None) -> torch.UntypedStorage:
        if storage is None or storage.nbytes() != slot.nbytes:
            given = "None" if storage is None else f"{storage.nbytes()} bytes"
            raise InputError(name, given, f"a storage of the slot's size, {slot.nbytes} bytes")
        return storage


def _filled(room: Room, work: Callable[[], None]) -> Callable[[], None]:
    def read() -> None:
        if not room.filled:
            raise LanewayError(f"nothing was written to {room.slot}, or the write failed")
        work()

    return read


def _ignore(error: BaseException | None) -> None:
    """What is waited for raises its error itself."""
