"""The disk tier: slots in one preallocated file.

Bytes go between storages and the file past the page cache (O_DIRECT) where the file system takes that: whole blocks of storages
that begin at a page straight from and to their memory, everything else through a small aligned buffer, so no byte beside a
storage's is ever read or written. Storages of an accelerator go through pinned host memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch

from laneway.core import positive_int
from laneway.memory.backing import BLOCK, BackingFile
from laneway.memory.copying import PAGE, DeviceCopier, Staging, bytes_of, mark, memory_at, move
from laneway.memory.offsets import OffsetAllocator, rounded
from laneway.memory.queued import QueuedTier
from laneway.memory.throttle import Throttle
from laneway.memory.tier import Slot

STAGING_BYTES = 4 << 20

_log = logging.getLogger("laneway")


class DiskTier(QueuedTier):
    """A file of ``capacity`` bytes in ``folder``; nothing of it is left when the process ends, however it ends.

    Slots begin at multiples of 4096 bytes and take a multiple of that, so less than ``capacity`` may fit.

    Args:
        folder: where the file lies; the disk needs ``capacity`` bytes free.
        capacity: bytes, rounded up to a multiple of 4096.
        throttle: caps what isn't urgent.
        direct: True: O_DIRECT or an error; False: through the page cache; None: O_DIRECT where the file system takes it.

    Raises:
        InputError: a capacity or folder that isn't one; ``direct`` where it isn't possible.
        LanewayError: the folder can't be written to, or has not enough room.
    """

    def __init__(
        self, folder: str | Path, capacity: int, *, throttle: Throttle | None = None, direct: bool | None = None
    ) -> None:
        super().__init__("disk", rounded(positive_int("capacity", capacity), BLOCK))
        self._file = BackingFile(Path(folder), self.capacity, direct)
        if direct is None and not self._file.direct:
            _log.warning("disk tier: the file system of %s takes no O_DIRECT; the page cache stands between", folder)
        self._offsets = OffsetAllocator(self.capacity, BLOCK)
        self._writer, self._reader = _Copier(self._file), _Copier(self._file)
        self._begin(torch.device("cpu"), throttle)

    @property
    def direct(self) -> bool:
        """Whether reads and writes go past the page cache."""
        return self._file.direct

    def _take(self, nbytes: int) -> int | None:
        return self._offsets.allocate(nbytes)

    def _give(self, slot: Slot) -> None:
        self._offsets.release(slot.offset)

    def _writing(self, slot: Slot, source: torch.UntypedStorage) -> Callable[[], None]:
        copier, after = self._writer, mark(source)
        return lambda: copier.write(slot, source, after)

    def _reading(self, slot: Slot, target: torch.UntypedStorage) -> Callable[[], None]:
        copier, after = self._reader, mark(target)
        return lambda: copier.read(slot, target, after)

    def _shut(self) -> None:
        self._file.close()


class _Copier:
    """Copies of one direction, on one thread."""

    def __init__(self, file: BackingFile) -> None:
        self.file = file
        self.copy = DeviceCopier()
        self._staging: dict[str, Staging] = {}

    def write(self, slot: Slot, source: torch.UntypedStorage, after: torch.Event | None) -> None:
        straight = self._straight(source)
        if straight:
            self.file.write(memory_at(source.data_ptr(), straight), slot.offset)
        for at, nbytes, staging in self._pieces(source, straight):
            if after is None:
                move(staging.address, source.data_ptr() + at, nbytes)
            else:
                self.copy(staging.tensor[:nbytes], bytes_of(source)[at : at + nbytes], after)
            self.file.write(staging.view[: self._whole(nbytes)], slot.offset + at)

    def read(self, slot: Slot, target: torch.UntypedStorage, after: torch.Event | None) -> None:
        straight = self._straight(target)
        if straight:
            self.file.read(memory_at(target.data_ptr(), straight), slot.offset)
        for at, nbytes, staging in self._pieces(target, straight):
            self.file.read(staging.view[: self._whole(nbytes)], slot.offset + at)
            if after is None:
                move(target.data_ptr() + at, staging.address, nbytes)
            else:
                self.copy(bytes_of(target)[at : at + nbytes], staging.tensor[:nbytes], after)

    def _straight(self, storage: torch.UntypedStorage) -> int:
        """How many of its first bytes may go between its memory and the file without a copy between."""
        if storage.device.type != "cpu":
            return 0
        if not self.file.direct:
            return storage.nbytes()
        return storage.nbytes() // BLOCK * BLOCK if storage.data_ptr() % PAGE == 0 else 0

    def _pieces(self, storage: torch.UntypedStorage, start: int) -> list[tuple[int, int, Staging]]:
        if start == storage.nbytes():
            return []
        kind = storage.device.type
        if kind not in self._staging:
            self._staging[kind] = Staging(STAGING_BYTES, storage.device)
        ends = range(start, storage.nbytes(), STAGING_BYTES)
        return [(at, min(STAGING_BYTES, storage.nbytes() - at), self._staging[kind]) for at in ends]

    def _whole(self, nbytes: int) -> int:
        return rounded(nbytes, BLOCK) if self.file.direct else nbytes
