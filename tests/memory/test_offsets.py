"""Offsets: pieces never overlap, holes join, and the books are exact."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from laneway.core import InputError, LanewayError
from laneway.memory.offsets import OffsetAllocator, rounded


class Machine(RuleBasedStateMachine):
    """The allocator beside a list of the pieces that it gave out."""

    offsets = Bundle("offsets")

    def __init__(self) -> None:
        super().__init__()
        self.allocator = OffsetAllocator(64 * 16 + 5, alignment=16)
        self.held: dict[int, int] = {}

    @rule(target=offsets, nbytes=st.integers(1, 300))
    def allocate(self, nbytes: int) -> int | None:
        hole = self.largest_hole()
        offset = self.allocator.allocate(nbytes)
        assert (offset is not None) == (rounded(nbytes, 16) <= hole)
        if offset is not None:
            self.held[offset] = nbytes
        return offset

    @rule(offset=consumes(offsets))
    def release(self, offset: int | None) -> None:
        if offset is not None:
            assert self.allocator.release(offset) == self.held.pop(offset)

    @rule(offset=st.integers(0, 1100))
    def release_what_is_not_held(self, offset: int) -> None:
        if offset not in self.held:
            with pytest.raises(LanewayError, match=f"offset {offset}"):
                self.allocator.release(offset)

    @invariant()
    def pieces_lie_apart(self) -> None:
        end = 0
        for offset, nbytes in sorted(self.held.items()):
            assert offset >= end
            assert offset % 16 == 0
            end = offset + rounded(nbytes, 16)
        assert end <= 64 * 16

    @invariant()
    def books_are_exact(self) -> None:
        assert self.allocator.used == sum(self.held.values())
        assert self.allocator.taken == sum(rounded(n, 16) for n in self.held.values())
        assert self.allocator.pieces == len(self.held)
        assert self.allocator.largest == self.largest_hole()

    def largest_hole(self) -> int:
        largest = end = 0
        for offset, nbytes in sorted(self.held.items()):
            largest = max(largest, offset - end)
            end = offset + rounded(nbytes, 16)
        return max(largest, 64 * 16 - end)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_smallest_hole_that_fits_is_taken() -> None:
    allocator = OffsetAllocator(10 * 4096)
    offsets = [allocator.allocate(n * 4096) for n in (3, 1, 2, 1)]
    assert offsets == [0, 3 * 4096, 4 * 4096, 6 * 4096]
    allocator.release(0)
    allocator.release(4 * 4096)
    assert allocator.allocate(5000) == 4 * 4096
    assert allocator.allocate(3 * 4096) == 0


def test_bad_sizes_are_refused() -> None:
    allocator = OffsetAllocator(4096)
    for nbytes in (0, -1, 1.5):
        with pytest.raises(InputError, match="nbytes"):
            allocator.allocate(nbytes)  # type: ignore[arg-type]
    assert OffsetAllocator(4095).allocate(1) is None
