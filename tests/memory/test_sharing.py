"""How long transfers and collectives share a link, and wait for each other: on a clock, over a real tier, and in a run's rows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tiers import noise
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from laneway.memory.clock import VirtualClock
from laneway.memory.collectives import InFlight
from laneway.memory.config import MemoryConfig
from laneway.memory.host import HostTier
from laneway.memory.manage import make_throttle
from laneway.memory.manager import MemoryManager
from laneway.memory.meter import device_meter
from laneway.memory.sharing import Sharing
from laneway.memory.throttle import Throttle
from laneway.train.memory import RunMemory

CPU = torch.device("cpu")
SPANS = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), max_size=6)


@given(SPANS, SPANS)
def test_the_time_both_are_under_way_is_counted_once(collectives, transfers) -> None:
    clock, changes = VirtualClock(), []
    sharing = Sharing(clock)
    open_transfers = {}
    for number, (start, length) in enumerate(collectives):
        changes += [(start, sharing.begin), (start + length, sharing.end)]
        assert number < 6
    for number, (start, length) in enumerate(transfers):
        open_transfers[number] = sharing.transfer()
        changes.append((start, open_transfers[number].__enter__))
        changes.append((start + length, lambda n=number: open_transfers[n].__exit__(None, None, None)))
    for moment, change in sorted(changes, key=lambda pair: pair[0]):
        clock.advance_to(float(moment))
        change()
    ticks = range(80)
    busy = [any(a <= t < a + n for a, n in collectives) and any(a <= t < a + n for a, n in transfers) for t in ticks]
    assert sharing.contention_seconds == sum(busy)
    assert not sharing()
    assert sharing.seen == len(collectives)


def test_a_real_tiers_transfers_are_seen_beside_a_collective_and_wait_for_it() -> None:
    flying = InFlight()
    tier = HostTier(1 << 20, "cpu", throttle=Throttle(reservation=1.0, busy=flying))
    slot, source = tier.allocate(1 << 16), noise(1 << 16)
    tier.write(slot, source, lambda error: None).wait()
    assert flying.contention_seconds == flying.held_seconds == 0.0
    with flying.collective():
        queued = tier.write(slot, source, lambda error: None)
        time.sleep(0.1)
        tier.poll()
        assert not queued.done
    queued.wait()
    assert flying.held_seconds >= 0.08
    assert flying.contention_seconds == 0.0
    work = tier._writing

    def slow(*args: object) -> object:
        copy = work(*args)
        return lambda: (time.sleep(0.05), copy())

    tier._writing = slow
    with flying.collective():
        tier.write(slot, source, lambda error: None).wait()  # asked for, so it goes ahead
    assert 0.05 <= flying.contention_seconds < 5.0
    tier.release(slot)
    tier.close()


def test_a_link_without_caps_is_looked_at_all_the_same() -> None:
    config = MemoryConfig(budget="1GiB", collective_reservation=0.0)
    assert make_throttle(config) is None
    flying = InFlight()
    throttle = make_throttle(config, flying)
    assert throttle is not None
    assert throttle.sharing is flying
    with flying.collective():
        assert throttle.delay(0.0) == 0.0


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_ddps_reductions_come_into_the_rows(alone: None) -> None:
    torch.manual_seed(0)
    model = nn.Linear(30, 30)
    ddp, flying = DistributedDataParallel(model), InFlight()
    flying.watch(ddp)
    tier = HostTier(1 << 20, CPU, throttle=Throttle(busy=flying))
    manager = MemoryManager(model, MemoryConfig(budget=1 << 30), tier, device_meter(CPU), CPU)
    memory = RunMemory(manager, flying=flying)
    assert memory.row() == {}
    with flying.transfer():
        for _ in range(3):
            ddp(torch.randn(4, 30)).square().mean().backward()
    row = memory.row()
    assert flying.seen == 3
    assert not flying()
    assert row["memory_transfer_contention_seconds"] == flying.contention_seconds > 0.0
    assert row["memory_transfer_held_seconds"] == 0.0
    assert memory.row()["memory_transfer_contention_seconds"] == 0.0
    averaging = RunMemory(manager, average=True)
    averaging.reduce(ddp)
    assert averaging.flying.seen == 1
    manager.close()
