"""The host tier: slots in host memory, page-locked for an accelerator as far as a cap allows."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import torch

from laneway.core import InputError, positive_int
from laneway.memory.blocks import Block, PinnedSlabs, PlainMemory
from laneway.memory.copying import DeviceCopier, bytes_of, mark, move
from laneway.memory.queued import QueuedTier
from laneway.memory.throttle import Throttle
from laneway.memory.tier import Slot

_log = logging.getLogger("laneway")


class HostTier(QueuedTier):
    """``capacity`` bytes of host memory for storages of ``device``.

    For an accelerator the copies run on streams of their own, one a direction; each begins after the work that was on the
    caller's stream when it was submitted. For the CPU it is a second pool of memory with a cap of its own, which torch's
    allocator doesn't see; threads copy. Memory is taken as slots are, not at the start.

    Args:
        capacity: bytes in slots at most.
        device: whose storages come and go; those of the CPU are taken too.
        throttle: caps what isn't urgent.
        pinned: most bytes to page-lock; None: ``capacity``, at most half of the host's memory. What lies beyond is pageable.

    Raises:
        InputError: a capacity or cap that isn't one, or a device that isn't there.
    """

    def __init__(
        self,
        capacity: int,
        device: torch.device | str,
        *,
        throttle: Throttle | None = None,
        pinned: int | None = None,
    ) -> None:
        super().__init__("host", capacity)
        self.device = _present(device)
        half = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
        cap = min(capacity, half) if pinned is None else positive_int("pinned", pinned, 0)
        self._slabs = PinnedSlabs(cap) if self.device.type != "cpu" else None
        self._plain = PlainMemory(capacity)
        self._blocks: dict[int, Block] = {}
        self._serial = 0
        self._fell_back = False
        self._writer, self._reader = DeviceCopier(), DeviceCopier()
        self._begin(self.device, throttle)

    @property
    def pinned_bytes(self) -> int:
        """Bytes page-locked now."""
        return self._slabs.held if self._slabs is not None else 0

    @property
    def held_bytes(self) -> int:
        """Bytes of host memory that the tier has from the system now, waiting and page-locked ones included."""
        return self._plain.held + self.pinned_bytes

    def _take(self, nbytes: int) -> int | None:
        block = self._slabs.take(nbytes) if self._slabs is not None else None
        if block is None:
            if self._slabs is not None and not self._fell_back:
                self._fell_back = True
                why = "the system refused more" if self._slabs.refused else f"the cap is {self._slabs.cap}"
                _log.warning("host tier: %d bytes are page-locked and %s; what follows is pageable", self._slabs.held, why)
            self._plain.trim(self.capacity - self.used - nbytes)
            block = self._plain.take(nbytes)
        self._serial += 1
        self._blocks[self._serial] = block
        return self._serial

    def _give(self, slot: Slot) -> None:
        block = self._blocks.pop(slot.offset)
        if isinstance(block.place, tuple) and self._slabs is not None:
            self._slabs.give(block)
        else:
            self._plain.give(block)

    def _writing(self, slot: Slot, source: torch.UntypedStorage) -> Callable[[], None]:
        block, copier, after = self._blocks[slot.offset], self._writer, mark(source)
        if after is None:
            return lambda: move(block.address, source.data_ptr(), slot.nbytes)
        return lambda: copier(block.tensor, bytes_of(source), after)

    def _reading(self, slot: Slot, target: torch.UntypedStorage) -> Callable[[], None]:
        block, copier, after = self._blocks[slot.offset], self._reader, mark(target)
        if after is None:
            return lambda: move(target.data_ptr(), block.address, slot.nbytes)
        return lambda: copier(bytes_of(target), block.tensor, after)

    def _shut(self) -> None:
        for slot in [Slot(serial, 0) for serial in self._blocks]:
            self._give(slot)
        self._plain.close()
        if self._slabs is not None:
            self._slabs.close()


def _present(device: torch.device | str) -> torch.device:
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InputError("device", device, "the CPU or an accelerator of this machine") from error
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found.type != "cpu" and (here is None or here.type != found.type):
        raise InputError("device", str(device), f"cpu or {here}" if here is not None else "cpu: this machine has no accelerator")
    return found
