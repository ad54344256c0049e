"""The host tier's memory: what it holds is what was asked for, and all of it goes back."""

from __future__ import annotations

import logging
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import Ends, noise

from laneway.core import InputError
from laneway.memory import blocks
from laneway.memory.blocks import PinnedSlabs, PlainMemory
from laneway.memory.host import HostTier

MIB = 1 << 20
needs_accelerator = pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")


@settings(deadline=None)
@given(st.lists(st.integers(1, 500_000), min_size=1, max_size=30), st.integers(0, 2_000_000))
def test_plain_memory_is_what_was_asked_for(sizes: list[int], spare: int) -> None:
    memory = PlainMemory(spare)
    taken = [memory.take(n) for n in sizes]
    assert [b.tensor.numel() for b in taken] == sizes
    assert sum(sizes) <= memory.held <= 1.0625 * sum(sizes)
    ranges = sorted((b.address, b.tensor.numel()) for b in taken)
    assert all(a + n <= b for (a, n), (b, _) in pairwise(ranges))
    for block in taken:
        memory.give(block)
    assert memory.held == memory.waiting <= spare
    memory.close()
    assert memory.held == memory.waiting == 0


def test_blocks_are_used_again_for_their_size_only() -> None:
    memory = PlainMemory(10 * MIB)
    first = memory.take(MIB)
    address = first.address
    memory.give(first)
    assert memory.take(2 * MIB).address != address
    assert memory.take(MIB).address == address


def test_the_tier_never_holds_more_than_its_capacity_in_pages() -> None:
    tier = HostTier(4 * MIB, "cpu")
    for size in (MIB, 2 * MIB, 4 * MIB, 3 * MIB, MIB):
        slot = tier.allocate(size)
        assert tier.held_bytes <= tier.capacity
        tier.release(slot)
    slots = [tier.allocate(MIB // 2) for _ in range(8)]
    assert tier.held_bytes == tier.used == tier.capacity
    tier.write(slots[0], noise(MIB // 2), Ends())
    tier.close()
    tier.close()
    assert tier.held_bytes == tier.pinned_bytes == tier.used == 0


def plain_slabs(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Page-locking that works up to ``most`` bytes a slab, on machines where it doesn't."""
    monkeypatch.setattr(blocks, "pinned", lambda n: torch.empty(n, dtype=torch.uint8) if n <= most else None)


def test_slabs_are_powers_of_two_under_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    plain_slabs(monkeypatch, most=1 << 40)
    slabs = PinnedSlabs(cap=100 * MIB)
    first = slabs.take(10 * MIB)
    assert first is not None
    assert slabs.held == 64 * MIB
    second = slabs.take(60 * MIB)  # 64 more would be over the cap
    assert second is None
    third = slabs.take(50 * MIB)  # beside the first
    assert third is not None
    assert first.address + 10 * MIB <= third.address or third.address + 50 * MIB <= first.address
    fourth = slabs.take(20 * MIB)
    assert fourth is not None
    assert slabs.held == 96 * MIB
    slabs.give(fourth)
    assert slabs.held == 64 * MIB
    slabs.give(first)
    slabs.give(third)
    assert slabs.held == 64 * MIB  # the last one stays for the next step
    slabs.close()
    assert slabs.held == 0


def test_a_refusal_to_lock_pages_is_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    plain_slabs(monkeypatch, most=0)
    slabs = PinnedSlabs(cap=100 * MIB)
    assert slabs.take(MIB) is None
    plain_slabs(monkeypatch, most=1 << 40)
    assert slabs.take(MIB) is None
    assert (slabs.refused, slabs.held) == (True, 0)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without an accelerator")
def test_an_accelerator_that_is_not_there_is_refused() -> None:
    with pytest.raises(InputError, match="this machine has no accelerator"):
        HostTier(MIB, "cuda")


def test_bad_arguments_are_named() -> None:
    with pytest.raises(InputError, match="device"):
        HostTier(MIB, "nowhere")
    with pytest.raises(InputError, match="capacity"):
        HostTier(0, "cpu")
    with pytest.raises(InputError, match="pinned"):
        HostTier(MIB, "cpu", pinned=-1)


@needs_accelerator
def test_an_accelerators_bytes_come_back_and_the_cap_holds(caplog: pytest.LogCaptureFixture) -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    with caplog.at_level(logging.WARNING, logger="laneway"):
        tier = HostTier(256 * MIB, device, pinned=64 * MIB)
        sources = [torch.randn(10 * MIB // 4 + 1, device=device) for _ in range(12)]
        slots = [tier.allocate(s.untyped_storage().nbytes()) for s in sources]
    assert tier.pinned_bytes == 64 * MIB
    assert sum("page-locked" in r.getMessage() for r in caplog.records) == 1
    for slot, source in zip(slots, sources, strict=True):
        source.mul_(3.0)  # still running when the copy is queued
        tier.write(slot, source.untyped_storage(), Ends())
    for slot, source in zip(slots, sources, strict=True):
        target = torch.full_like(source, float("nan"))
        tier.read(slot, target.untyped_storage(), Ends()).wait()
        assert torch.equal(target, source)
    tier.close()
    assert tier.held_bytes == 0
