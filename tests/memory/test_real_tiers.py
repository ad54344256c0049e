"""What the disk and the host tier have in common: bytes come back as they went, in order, and no failure gets lost."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import threading
import time
import warnings
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiers import Ends, content, make_tier, noise, same

from laneway.core import InputError, LanewayError
from laneway.memory.queued import QueuedTier
from laneway.memory.throttle import Throttle
from laneway.memory.tier import TierFullError

DTYPES = [d for d in vars(torch).values() if isinstance(d, torch.dtype) and not str(d).startswith(("torch.q", "torch.bits"))]


@pytest.fixture(params=["disk", "buffered", "host"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[QueuedTier]:
    made = make_tier(request.param, tmp_path)
    assert isinstance(made, QueuedTier)
    yield made
    made.close()
    assert (made.used, made.slots) == (0, 0)
    assert list(tmp_path.iterdir()) == []


class Gate:
    """Holds copies of one direction back until it is opened."""

    def __init__(self, tier: QueuedTier, name: str) -> None:
        self.open, self.entered = threading.Event(), threading.Event()
        made = getattr(tier, name)

        def held(slot: object, storage: object) -> object:
            work = made(slot, storage)

            def run() -> None:
                self.entered.set()
                assert self.open.wait(20)
                work()

            return run

        setattr(tier, name, held)


@pytest.mark.parametrize("dtype", sorted(set(DTYPES), key=str), ids=str)
def test_bytes_of_every_dtype_come_back(tier: QueuedTier, dtype: torch.dtype) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls some of them experimental
        source, target = (torch.empty(1237, dtype=dtype).untyped_storage() for _ in range(2))
    ctypes.memmove(source.data_ptr(), content(noise(source.nbytes())), source.nbytes())
    slot = tier.allocate(source.nbytes())
    tier.write(slot, source, Ends()).wait()
    tier.read(slot, target, Ends()).wait()
    assert same(source, target)
    assert target.resizable()
    tier.release(slot)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.one_of(st.integers(1, 20_000), st.sampled_from([4095, 4096, 4097, 65_536, 1_000_003])), min_size=1, max_size=8)
)
def test_many_slots_of_odd_sizes(tier: QueuedTier, sizes: list[int]) -> None:
    sources = [noise(n) for n in sizes]
    slots = [tier.allocate(n) for n in sizes]
    assert tier.used == sum(sizes)
    for slot, source in zip(slots, sources, strict=True):
        tier.write(slot, source, Ends())
    order = random.sample(range(len(sizes)), len(sizes))
    targets = {i: torch.UntypedStorage(sizes[i]) for i in order}
    for i in order:
        tier.read(slots[i], targets[i], Ends(), urgent=random.random() < 0.5)
        tier.release(slots[i])
    for _ in range(2000):
        tier.poll()
        if tier.used == 0:
            break
        time.sleep(0.005)
    assert tier.used == 0
    assert all(same(sources[i], targets[i]) for i in order)


@pytest.mark.parametrize("start", [0, 1, 64, 4095, 4096])
@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 10_000, 5_000_001])
def test_neighbours_in_memory_are_left_alone(tier: QueuedTier, start: int, nbytes: int) -> None:
    """Storages inside a block whose bytes before and after are watched, at every alignment."""
    block = torch.full((3 * 4096 + nbytes + 4096,), 0xA5, dtype=torch.uint8)
    first = -block.data_ptr() % 4096 + start
    address = block.data_ptr() + first
    window = torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8)
    data = noise(nbytes)
    window.copy_(torch.frombuffer(bytearray(content(data)), dtype=torch.uint8))
    slot = tier.allocate(nbytes)
    tier.write(slot, window.untyped_storage(), Ends()).wait()
    window.zero_()
    tier.read(slot, window.untyped_storage(), Ends()).wait()
    assert content(window.untyped_storage()) == content(data)
    assert bool((block[:first] == 0xA5).all())
    assert bool((block[first + nbytes :] == 0xA5).all())
    tier.release(slot)


def test_a_read_waits_for_the_slow_write_of_its_slot(tier: QueuedTier) -> None:
    source, target = noise(100_000), noise(100_000)
    slot = tier.allocate(100_000)
    gate = Gate(tier, "_writing")
    tier.write(slot, source, Ends())
    read = tier.read(slot, target, Ends(), urgent=True)
    assert gate.entered.wait(20)
    tier.poll()
    assert not read.done
    gate.open.set()
    read.wait()
    assert same(source, target)


def test_rewriting_a_slot_keeps_the_order(tier: QueuedTier) -> None:
    slot = tier.allocate(70_000)
    versions = [noise(70_000) for _ in range(6)]
    targets = [torch.UntypedStorage(70_000) for _ in versions]
    reads = []
    for source, target in zip(versions, targets, strict=True):
        tier.write(slot, source, Ends())
        reads.append(tier.read(slot, target, Ends()))
    for read in reversed(reads):
        read.wait()
    assert all(same(a, b) for a, b in zip(versions, targets, strict=True))


def test_only_poll_and_wait_call_back_and_on_the_callers_thread(tier: QueuedTier) -> None:
    threads: list[int] = []
    slot = tier.allocate(1000)
    tier.write(slot, noise(1000), lambda _: threads.append(threading.get_ident()))
    while tier.traffic.writes == 0:
        time.sleep(0.001)
    assert threads == []
    tier.poll()
    assert threads == [threading.get_ident()]


def test_a_waiter_goes_first_and_what_has_not_begun_can_be_cancelled(tier: QueuedTier) -> None:
    gate = Gate(tier, "_writing")
    slots = [tier.allocate(1000) for _ in range(5)]
    order: list[int] = []
    writes = [tier.write(slot, noise(1000), lambda _, i=i: order.append(i)) for i, slot in enumerate(slots)]
    assert gate.entered.wait(20)
    assert not writes[0].cancel()
    assert writes[2].cancel()
    threading.Timer(0.05, gate.open.set).start()
    writes[4].wait()
    for i in (1, 3):
        writes[i].wait()
    assert order == [0, 4, 1, 3]
    assert tier.traffic.writes == 4
    with pytest.raises(LanewayError, match="cancelled"):
        writes[2].wait()


def test_an_error_of_a_copy_reaches_the_callback_and_the_waiter(tier: QueuedTier) -> None:
    made = tier._writing

    def broken(slot: object, storage: object) -> object:
        def run() -> None:
            raise OSError(5, "the disk is on fire")

        return run

    tier._writing = broken  # type: ignore[method-assign, assignment]
    ends, slot = Ends(), tier.allocate(1000)
    write = tier.write(slot, noise(1000), ends)
    with pytest.raises(OSError, match="on fire"):
        write.wait()
    with pytest.raises(OSError, match="on fire"):
        write.wait()
    assert [type(e) for e in ends.errors] == [OSError]
    with pytest.raises(LanewayError, match="nothing was written"):
        tier.read(slot, noise(1000), Ends()).wait()
    tier._writing = made  # type: ignore[method-assign]
    source, target = noise(1000), noise(1000)
    tier.write(slot, source, Ends()).wait()  # the thread went on
    tier.read(slot, target, Ends()).wait()
    assert same(source, target)


def test_a_broken_throttle_fails_the_transfer_and_not_the_waiter(tier: QueuedTier) -> None:
    class Broken(Throttle):
        def delay(self, now: float) -> float:
            raise ZeroDivisionError("no rate")

    tier._queue.throttle = Broken()
    ends, slot = Ends(), tier.allocate(10)
    tier.write(slot, noise(10), ends)
    for _ in range(2000):
        tier.poll()
        if ends.errors:
            break
        time.sleep(0.005)
    assert [type(e) for e in ends.errors] == [ZeroDivisionError]


def test_the_throttle_holds_for_what_nobody_waits_for(tier: QueuedTier) -> None:
    begun: list[float] = []

    class Counting(Throttle):
        def pay(self, nbytes: int, now: float, seconds: float = 0.0) -> None:
            begun.append(now)
            super().pay(nbytes, now, seconds)

    tier._queue.throttle = Counting(operations_per_second=100.0, burst=0.0)
    slots = [tier.allocate(100) for _ in range(8)]
    writes = [tier.write(slot, noise(100), Ends()) for slot in slots[:7]]
    while not all(t.done for t in writes):
        tier.poll()
        time.sleep(0.001)
    assert all(b - a >= 0.01 * (1 - 1e-6) for a, b in pairwise(begun))
    tier._queue.throttle = Counting(operations_per_second=1e-3)
    tier.write(slots[7], noise(100), Ends())
    tier.write(slots[0], noise(100), Ends()).wait()  # would not begin within a quarter of an hour
    assert tier.traffic.writes >= 8


def test_sources_are_held_until_the_end_and_not_longer(tier: QueuedTier) -> None:
    gate = Gate(tier, "_writing")
    data = noise(50_000)
    expected = content(data)
    slot = tier.allocate(50_000)
    from torch.multiprocessing.reductions import StorageWeakRef

    watch = StorageWeakRef(data)
    write = tier.write(slot, data, Ends())
    del data
    gc.collect()
    assert not watch.expired()
    gate.open.set()
    write.wait()
    gc.collect()
    assert watch.expired()
    target = torch.UntypedStorage(50_000)
    tier.read(slot, target, Ends()).wait()
    assert content(target) == expected


def test_a_full_tier_says_so_and_goes_on(tier: QueuedTier) -> None:
    slot = tier.allocate(tier.capacity)
    with pytest.raises(TierFullError, match=f"{tier.name} tier: 1 bytes"):
        tier.allocate(1)
    tier.release(slot)
    tier.release(tier.allocate(tier.capacity))
    assert tier.peak == tier.capacity


def test_misuse_is_refused(tier: QueuedTier) -> None:
    slot = tier.allocate(100)
    for wrong in (None, noise(99)):
        with pytest.raises(InputError, match="source"):
            tier.write(slot, wrong, Ends())
    with pytest.raises(LanewayError, match="nothing was written"):
        tier.read(slot, noise(100), Ends()).wait()
    tier.release(slot)
    with pytest.raises(LanewayError, match="released"):
        tier.release(slot)
    with pytest.raises(LanewayError, match="released"):
        tier.write(slot, noise(100), Ends())
    with pytest.raises(InputError, match="nbytes"):
        tier.allocate(0)


def test_closing_ends_everything(tier: QueuedTier) -> None:
    gate, ends = Gate(tier, "_writing"), Ends()
    transfers = [tier.write(tier.allocate(1000), noise(1000), ends) for _ in range(3)]
    assert gate.entered.wait(20)
    threading.Timer(0.05, gate.open.set).start()
    tier.close()
    tier.close()
    assert [type(e) for e in ends.errors].count(LanewayError) == 2
    assert ends.errors.count(None) == 1
    assert transfers[0].wait() == 0.0
    with pytest.raises(LanewayError, match="closed"):
        transfers[2].wait()
    with pytest.raises(LanewayError, match="closed"):
        tier.allocate(1)
    assert not any(t.name.startswith(f"{tier.name} tier") and t in tier._queue._threads.values() for t in threading.enumerate())


def test_a_forgotten_tier_ends_its_threads(tmp_path: Path) -> None:
    made = make_tier("disk", tmp_path)
    assert isinstance(made, QueuedTier)
    threads = list(made._queue._threads.values())
    assert len(threads) == 2
    del made
    gc.collect()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def test_bandwidth_is_measured_before_the_first_transfer(tier: QueuedTier) -> None:
    assert all(1e6 < rate < 1e12 for rate in tier.bandwidth())
    assert (tier.traffic.writes, tier.traffic.bytes_read, tier.peak) == (0, 0, 0)


def test_a_forked_child_is_told(tier: QueuedTier) -> None:
    slot = tier.allocate(10)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            tier.write(slot, noise(10), Ends())
        except LanewayError:
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    tier.write(slot, noise(10), Ends()).wait()
