"""Blocks of host memory for slots: plain pages of exactly the size asked for, or parts of page-locked slabs under a hard cap."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field

import torch
from torch import Tensor

from laneway.memory.copying import PAGE, pinned
from laneway.memory.offsets import OffsetAllocator, rounded

SLAB_BYTES = 64 << 20
SMALLEST_SLAB = 1 << 20
SMALL = 16 * PAGE  # below it a mapping of its own would waste much of a page


@dataclass(frozen=True)
class Block:
    """``tensor``: [nbytes] uint8 in host memory. ``place``: what its owner needs to take it back."""

    tensor: Tensor
    place: object = None

    @property
    def address(self) -> int:
        """Where it begins."""
        return self.tensor.data_ptr()


class PlainMemory:
    """A mapping from the system for each block (small ones: the heap); those given back wait for the next of their size.

    Args:
        spare: most bytes that wait.

    Attributes:
        held: bytes in blocks, of large ones in whole pages, waiting ones included.
    """

    def __init__(self, spare: int) -> None:
        self.spare, self.held, self.waiting = spare, 0, 0
        self._waiting: dict[int, list[mmap.mmap]] = {}

    def take(self, nbytes: int) -> Block:
        """A block of ``nbytes`` with anything in it."""
        if nbytes < SMALL:
            self.held += nbytes
            return Block(torch.frombuffer(bytearray(nbytes), dtype=torch.uint8))
        size = rounded(nbytes, PAGE)
        if self._waiting.get(size):
            pages = self._waiting[size].pop()
            self.waiting -= size
        else:
            pages = mmap.mmap(-1, size)
            self.held += size
        return Block(torch.frombuffer(pages, dtype=torch.uint8, count=nbytes), pages)

    def give(self, block: Block) -> None:
        """Undo of ``take``."""
        pages = block.place
        if not isinstance(pages, mmap.mmap):
            self.held -= block.tensor.numel()
            return
        size = len(pages)
        if self.waiting + size <= self.spare:
            self._waiting.setdefault(size, []).append(pages)
            self.waiting += size
        else:
            self.held -= size

    def trim(self, nbytes: int) -> None:
        """Return waiting blocks to the system until at most ``nbytes`` wait, the largest first."""
        for size in sorted(self._waiting, reverse=True):
            while self._waiting[size] and self.waiting > nbytes:
                self._waiting[size].pop()
                self.waiting -= size
                self.held -= size

    def close(self) -> None:
        """Return everything that waits."""
        self.trim(0)


@dataclass(eq=False)
class _Slab:
    tensor: Tensor
    offsets: OffsetAllocator = field(init=False)

    def __post_init__(self) -> None:
        self.offsets = OffsetAllocator(self.tensor.numel(), PAGE)


class PinnedSlabs:
    """Page-locked memory in slabs of a power of two, which is what torch's host allocator would round any request up to.

    Args:
        cap: most bytes that are ever page-locked.

    Attributes:
        held: bytes page-locked now.
        refused: whether the system once refused to lock memory; it is not asked again.
    """

    def __init__(self, cap: int) -> None:
        self.cap, self.held, self.refused = cap, 0, False
        self._slabs: list[_Slab] = []

    def take(self, nbytes: int) -> Block | None:
        """A block of ``nbytes``; None where the cap, or the system, doesn't allow it."""
        for slab in [*self._slabs, None]:
            slab = slab or self._grow(nbytes)
            offset = slab.offsets.allocate(nbytes) if slab is not None else None
            if slab is not None and offset is not None:
                return Block(slab.tensor[offset : offset + nbytes], (slab, offset))
        return None

    def give(self, block: Block) -> None:
        """Undo of ``take``. The last slab stays, others go when they are empty."""
        assert isinstance(block.place, tuple)
        slab, offset = block.place
        slab.offsets.release(offset)
        if slab.offsets.pieces == 0 and len(self._slabs) > 1:
            self._slabs.remove(slab)
            self.held -= slab.tensor.numel()

    def close(self) -> None:
        """Unlock and return everything: torch's host allocator would keep it."""
        self._slabs.clear()
        self.held = 0
        if torch.accelerator.is_available():
            torch.accelerator.empty_host_cache()

    def _grow(self, nbytes: int) -> _Slab | None:
        need = 1 << (rounded(nbytes, PAGE) - 1).bit_length()
        size = max(SLAB_BYTES, need)
        while size > max(need, SMALLEST_SLAB) and self.held + size > self.cap:
            size //= 2
        if self.refused or self.held + size > self.cap:
            return None
        tensor = pinned(size)
        if tensor is None:
            self.refused = True
            return None
        slab = _Slab(tensor)
        self._slabs.append(slab)
        self.held += size
        return slab
