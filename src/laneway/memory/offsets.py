"""Where in one long block of memory each piece lies: best fit, neighbours joined again when they are freed."""

from __future__ import annotations

from bisect import bisect_left, insort

from laneway.core import LanewayError, positive_int


def rounded(nbytes: int, alignment: int) -> int:
    """``nbytes`` rounded up to a multiple of ``alignment``."""
    return -(-nbytes // alignment) * alignment


class OffsetAllocator:
    """Offsets for pieces of ``capacity`` bytes; knows no memory itself.

    Args:
        capacity: bytes; what lies beyond the last multiple of ``alignment`` isn't used.
        alignment: every offset is a multiple of it (bytes), and every piece takes a multiple of it.

    Attributes:
        used: bytes asked for and not released.
        taken: the same, each piece rounded up.
    """

    def __init__(self, capacity: int, alignment: int = 4096) -> None:
        self.alignment = positive_int("alignment", alignment)
        self.capacity = positive_int("capacity", capacity, 0) // alignment * alignment
        self.used = self.taken = 0
        self._pieces: dict[int, int] = {}  # offset → bytes asked for
        self._by_offset: list[tuple[int, int]] = []  # holes: (offset, size)
        self._by_size: list[tuple[int, int]] = []  # the same holes: (size, offset)
        if self.capacity:
            self._add_hole(0, self.capacity)

    @property
    def largest(self) -> int:
        """Bytes of the largest hole."""
        return self._by_size[-1][0] if self._by_size else 0

    @property
    def pieces(self) -> int:
        """How many pieces are held."""
        return len(self._pieces)

    def allocate(self, nbytes: int) -> int | None:
        """The offset of ``nbytes`` ≥ 1, in the smallest hole that holds them (the first of several); None: no hole does."""
        need = rounded(positive_int("nbytes", nbytes), self.alignment)
        index = bisect_left(self._by_size, (need, 0))
        if index == len(self._by_size):
            return None
        size, offset = self._by_size[index]
        self._drop_hole(offset, size)
        if size > need:
            self._add_hole(offset + need, size - need)
        self._pieces[offset] = nbytes
        self.used += nbytes
        self.taken += need
        return offset

    def release(self, offset: int) -> int:
        """Free the piece at ``offset``; returns the bytes that were asked for."""
        nbytes = self._pieces.pop(offset, None)
        if nbytes is None:
            raise LanewayError(f"no piece at offset {offset}: it was released before or never allocated")
        size = rounded(nbytes, self.alignment)
        self.used -= nbytes
        self.taken -= size
        index = bisect_left(self._by_offset, (offset, 0))
        if index < len(self._by_offset) and self._by_offset[index][0] == offset + size:
            after = self._by_offset[index]
            self._drop_hole(*after)
            size += after[1]
        if index > 0 and sum(self._by_offset[index - 1]) == offset:
            before = self._by_offset[index - 1]
            self._drop_hole(*before)
            offset, size = before[0], size + before[1]
        self._add_hole(offset, size)
        return nbytes

    def _add_hole(self, offset: int, size: int) -> None:
        insort(self._by_offset, (offset, size))
        insort(self._by_size, (size, offset))

    def _drop_hole(self, offset: int, size: int) -> None:
        del self._by_offset[bisect_left(self._by_offset, (offset, size))]
        del self._by_size[bisect_left(self._by_size, (size, offset))]
