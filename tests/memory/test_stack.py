"""Tiers on top of each other: bytes come back whichever they went to, what is needed first lies highest, nothing is left."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import content, noise
from torch import Tensor, nn

from laneway.core import InputError, LanewayError
from laneway.memory.activations import Activations
from laneway.memory.clock import VirtualClock
from laneway.memory.config import MemoryConfig
from laneway.memory.counting import CountingAllocator
from laneway.memory.disk import DiskTier
from laneway.memory.extents import storages
from laneway.memory.host import HostTier
from laneway.memory.manage import make_tier
from laneway.memory.manager import MemoryManager
from laneway.memory.meter import device_meter
from laneway.memory.profile import EntryProfile, Event, PassProfile
from laneway.memory.residency import Choice, Schedule
from laneway.memory.simulate import Link, simulate
from laneway.memory.simulated import SimulatedTier
from laneway.memory.stack import StackedTier
from laneway.memory.summary import summary
from laneway.memory.throttle import Throttle
from laneway.memory.tier import TierFullError

CPU = torch.device("cpu")


def pair(capacity: int = 1000, below: int = 1 << 20) -> StackedTier:
    clock = VirtualClock()
    return StackedTier([SimulatedTier(clock, capacity, 4e3, 8e3), SimulatedTier(clock, below, 1e3, 2e3)])


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(1, 400), st.booleans()), min_size=1, max_size=40), st.integers(0, 6000))
def test_every_block_comes_back_and_the_books_are_those_of_the_tiers(blocks: list[tuple[int, bool]], expected: int) -> None:
    stack = pair()
    stack.expect(expected)
    held, wrong = [], []
    for seed, (nbytes, release) in enumerate(blocks):
        slot, storage = stack.allocate(nbytes), noise(nbytes, seed)
        stack.write(slot, storage, wrong.append).wait()
        held.append((slot, content(storage)))
        if release:
            stack.release(held.pop(seed % len(held))[0])
        stack.poll()
        assert stack.used == sum(tier.used for tier in stack.tiers) == sum(slot.nbytes for slot, _ in held)
        assert stack.tiers[0].used <= 1000
    for slot, bytes_ in reversed(held):
        target = torch.UntypedStorage(slot.nbytes)
        stack.read(slot, target, wrong.append, urgent=True).wait()
        assert content(target) == bytes_
        stack.release(slot)
    assert set(wrong) <= {None}
    assert stack.used == 0
    assert stack.traffic.bytes_written == sum(nbytes for nbytes, _ in blocks)
    assert stack.traffic.bytes_written == sum(tier.traffic.bytes_written for tier in stack.tiers)


def test_what_comes_back_last_goes_below_where_the_amount_is_known() -> None:
    stack = pair(1000)
    stack.expect(1600)
    told = [stack.place(stack.allocate(200)) is stack.tiers[0] for _ in range(8)]
    assert told == [False] * 3 + [True] * 5
    unknown = pair(1000)
    assert [unknown.place(unknown.allocate(200)) is unknown.tiers[0] for _ in range(8)] == [True] * 5 + [False] * 3
    wrong = pair(1000, 300)
    wrong.expect(10_000)
    places = [wrong.place(wrong.allocate(200)) for _ in range(6)]
    assert places.count(wrong.tiers[0]) == 5, "a hint that is wrong costs no room"
    with pytest.raises(TierFullError):
        wrong.allocate(200)


def test_wrong_slots_and_use_after_close() -> None:
    stack = pair()
    slot = stack.allocate(10)
    stack.release(slot)
    with pytest.raises(LanewayError, match="isn't allocated"):
        stack.release(slot)
    stack.close()
    stack.close()
    stack.release(slot)
    with pytest.raises(LanewayError, match="closed"):
        stack.allocate(3)
    tier = SimulatedTier(VirtualClock(), 10, 1.0, 1.0)
    for tiers in ([tier], [tier, tier], []):
        with pytest.raises(InputError, match="two or more different tiers"):
            StackedTier(tiers)


def test_bandwidth_is_that_of_the_bytes_that_moved() -> None:
    stack = pair(100)
    assert stack.bandwidth() == (4e3, 8e3)
    for _ in range(2):
        slot = stack.allocate(100)
        stack.write(slot, noise(100), lambda error: None).wait()
    assert stack.bandwidth()[0] == pytest.approx(200 / (100 / 4e3 + 100 / 1e3))


def test_a_simulated_stack_is_faster_than_its_lower_tier_and_slower_than_its_upper() -> None:
    sizes = [100] * 8
    events = [Event("save", at, 0.05, 0) for at in range(8)]
    for at in reversed(range(8)):
        events += [Event("use", at, 0.05, 0), Event("free", at, 0.0, 0)]
    profile = PassProfile([EntryProfile(size) for size in sizes], events)
    fast, slow = Link(4e3, 4e3, 0.0), Link(5e2, 5e2, 0.0)
    stack = Link(4e3, 4e3, 0.0, capacity=400, below=slow)
    choices = [Choice.MOVE] * 8
    seconds = [simulate(profile, choices, link, 200.0).seconds for link in (fast, stack, slow)]
    assert seconds[0] < seconds[1] < seconds[2]


class Net(nn.Module):
    def __init__(self, width: int = 64, layers: int = 5) -> None:
        super().__init__()
        self.table = nn.Embedding(30, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(layers)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = x + block(x)
        return F.linear(x, self.table.weight)


def gradients(model: Net, seed: int) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    tokens = torch.randint(0, 30, (8, 48), generator=torch.Generator().manual_seed(seed))
    F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    return [p.grad.clone() for p in model.parameters()]


def test_the_engine_over_two_simulated_tiers() -> None:
    model = Net(8, 2)
    want = gradients(model, 0)
    clock, held = VirtualClock(), storages(model.parameters())
    stack = StackedTier([SimulatedTier(clock, 30_000, 1e6, 1e6), SimulatedTier(clock, 1 << 30, 1e5, 1e5)])
    activations = Activations(stack, clock, CPU, min_bytes=1, protected=lambda t: held.get(t) is not None)
    activations.begin(Schedule([Choice.MOVE] * 10_000, [0.0]))
    with activations.hooks():
        got = gradients(model, 0)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert all(tier.traffic.bytes_read > 0 for tier in stack.tiers)
    assert activations.account.bytes_out == stack.traffic.bytes_written


def test_host_and_disk_under_the_manager(tmp_path: Path) -> None:
    if CountingAllocator.installed() is None:
        CountingAllocator.install(caching=True)
    allocator = CountingAllocator.installed()
    assert allocator is not None
    model = Net()
    wants = [gradients(model, step) for step in range(4)]
    live = allocator.live
    allocator.reset_peak()
    gradients(model, 0)
    budget = live + (allocator.peak - live) // 2
    host = HostTier(500_000, "cpu", throttle=Throttle(bytes_per_second=1e9))
    disk = DiskTier(tmp_path, 1 << 25, throttle=Throttle(bytes_per_second=5e8))
    stack = StackedTier([host, disk])
    manager = MemoryManager(
        model, MemoryConfig(budget=budget, min_bytes=4096), stack, device_meter(CPU), CPU, recompute=False
    )  # fmt: skip
    with manager:
        for step, want in enumerate(wants):
            assert all(torch.equal(a, b) for a, b in zip(gradients(model, step), want, strict=True)), step
    assert [report.way for report in manager.passes] == ["recorded", "planned", "planned", "planned"]
    assert all(report.peak <= 1.05 * budget for report in list(manager.passes)[1:])
    gc.collect()
    assert stack.used == host.used == disk.used == 0
    told = summary(manager)
    assert told["tier"]["name"] == "host+disk"
    assert [tier["name"] for tier in told["tiers"]] == ["host", "disk"]
    assert all(tier["bytes_written"] > 0 and tier["bytes_read"] > 0 for tier in told["tiers"])
    assert told["tier"]["bytes_written"] == sum(tier["bytes_written"] for tier in told["tiers"])
    assert 0 < host.peak <= 500_000
    manager.close()
    assert host.held_bytes == 0
    assert list(tmp_path.iterdir()) == []


def test_it_is_made_by_its_name(tmp_path: Path) -> None:
    config = MemoryConfig(budget="1GiB", tier="host+disk", folder=str(tmp_path), host_buffer_ratio=0.01, max_bytes_per_second=7)
    made: list[Throttle] = []

    def throttle() -> Throttle:
        made.append(Throttle(float(config.max_bytes_per_second)))
        return made[-1]

    tier = make_tier(config, CPU, throttle, 1 << 20)
    assert isinstance(tier, StackedTier)
    assert [type(each) for each in tier.tiers] == [HostTier, DiskTier]
    assert [each._queue.throttle for each in tier.tiers] == made
    tier.close()
