"""Saved tensors that move as 8-bit integers: fewer bytes, a bounded and measured error, and exact where exact is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from laneway.memory.activations import Activations
from laneway.memory.clock import VirtualClock
from laneway.memory.coding import PIECE, CodingErrors, Int8
from laneway.memory.config import MemoryConfig
from laneway.memory.counting import CountingAllocator
from laneway.memory.disk import DiskTier
from laneway.memory.extents import storages
from laneway.memory.manager import MemoryManager
from laneway.memory.meter import device_meter
from laneway.memory.profile import EntryProfile, Event, PassProfile
from laneway.memory.residency import Choice, Schedule
from laneway.memory.simulate import Link, simulate
from laneway.memory.simulated import SimulatedTier
from laneway.memory.summary import metrics_of, summary

CPU = torch.device("cpu")


@settings(deadline=None, max_examples=40)
@given(
    st.one_of(st.integers(3, 700), st.integers(PIECE - 3, 2 * PIECE + 300)),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.integers(0, 2**30),
)
def test_each_element_is_within_its_blocks_bound(count: int, dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    exact = (torch.randn(count, generator=generator) * torch.rand(count, generator=generator).exp()).to(dtype)
    codec = Int8(dtype, exact.nbytes)
    coded = codec.encode(exact.untyped_storage())
    assert coded.nbytes() == codec.stored == -(-count // 4) * 4 + -(-count // 128) * 4
    found = torch.empty_like(exact)
    codec.decode(coded, found.untyped_storage())
    wrong = F.pad((found.double() - exact.double()).abs(), (0, -count % 128)).view(-1, 128).amax(1)
    most = F.pad(exact.double().abs(), (0, -count % 128)).view(-1, 128).amax(1)
    rounding = {torch.float32: 2**-22, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
    assert bool((wrong <= most * (1 / 254 + rounding) + 1e-7).all())
    reported = codec.error(coded, exact.untyped_storage())
    assert float(reported) == pytest.approx(float((found.double() - exact.double()).norm() / exact.double().norm()), rel=1e-5)


@pytest.mark.parametrize(
    ("make", "coded"),
    [
        (lambda: torch.randn(500), True),
        (lambda: torch.randn(20, 25).t(), True),
        (lambda: torch.randn(500).bfloat16(), True),
        (lambda: torch.randn(500).double(), False),
        (lambda: torch.randint(0, 9, (500,)), False),
        (lambda: torch.rand(500) > 0.5, False),
        (lambda: torch.randn(500)[:400], False),
        (lambda: torch.randn(500, 1).expand(500, 3), False),
        (lambda: torch.randn(5, 100).log_softmax(-1), False),
        (lambda: torch.zeros(500).masked_fill(torch.rand(500) > 0.5, float("-inf")), False),
        (lambda: torch.randn(500).index_fill(0, torch.tensor(3), float("nan")), False),
        (lambda: torch.randn(500).index_fill(0, torch.tensor(3), float("inf")), False),
        (lambda: torch.randn(500, dtype=torch.complex64), False),
        (lambda: torch.randn(1), False),
        (lambda: torch.randn(0), False),
    ],
)
def test_what_is_coded_and_what_stays_exact(make, coded: bool) -> None:
    activations = engine()
    activations.begin(Schedule([Choice.MOVE] * 9, [0.0]))
    tensor = make()
    held = activations.pack(tensor)
    found = activations.unpack(held)
    assert (found.dtype, found.stride()) == (tensor.dtype, tensor.stride())
    assert torch.equal(found.nan_to_num(), tensor.nan_to_num()) != coded
    assert torch.allclose(found.nan_to_num(), tensor.nan_to_num(), atol=0.05)
    assert (activations.account.bytes_out < tensor.untyped_storage().nbytes()) == coded or not tensor.numel()


def engine(model: nn.Module | None = None, coded: bool = True) -> Activations:
    clock, held = VirtualClock(), storages(model.parameters() if model is not None else [])
    tier = SimulatedTier(clock, 1 << 40, 1e6, 1e6)
    protected = lambda t: held.get(t) is not None  # noqa: E731
    return Activations(tier, clock, CPU, min_bytes=1, protected=protected, coded=coded)


def test_the_same_bits_as_another_dtype_stay_exact() -> None:
    activations = engine()
    activations.begin(Schedule([Choice.MOVE] * 9, [0.0]))
    x = torch.randn(300)
    held = activations.pack(x), activations.pack(x.view(torch.int32)), activations.pack(x.view(20, 15))
    assert torch.equal(activations.unpack(held[1]), x.view(torch.int32))
    assert not torch.equal(activations.unpack(held[0]), x)
    assert torch.equal(activations.unpack(held[0]), activations.unpack(held[2]).flatten())


class Net(nn.Module):
    def __init__(self, layers: int = 4, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(layers)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return F.linear(x, self.embedding.weight)


def loss_of(model: Net, seed: int) -> Tensor:
    tokens = torch.randint(0, 40, (8, 48), generator=torch.Generator().manual_seed(seed))
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())


def gradients(model: Net, seed: int) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    loss_of(model, seed).backward()
    return [p.grad.clone() for p in model.parameters()]


def relative(got: list[Tensor], want: list[Tensor]) -> float:
    wrong = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(got, want, strict=True))
    return (wrong / sum(float(b.double().square().sum()) for b in want)) ** 0.5


def test_everything_moved_coded_against_fp64() -> None:
    torch.manual_seed(int(torch.randint(1 << 30, ())))
    model = Net()
    double = Net().double()
    double.load_state_dict(model.state_dict())
    want = gradients(double, 0)
    activations = engine(model)
    activations.begin(Schedule([Choice.MOVE] * 10_000, [0.0]))
    with activations.hooks():
        got = gradients(model, 0)
    assert 1e-5 < relative(got, want) < 0.02
    exact = engine(model, coded=False)
    exact.begin(Schedule([Choice.MOVE] * 10_000, [0.0]))
    with exact.hooks():
        same = gradients(model, 0)
    plain = gradients(model, 0)
    assert all(torch.equal(a, b) for a, b in zip(same, plain, strict=True))
    assert activations.account.bytes_out < 0.45 * exact.account.bytes_out
    assert activations.books.resident == activations.alive == 0
    assert activations.errors is not None
    mean, most = activations.errors.mean_and_most() or (0.0, 0.0)
    assert 1e-4 < mean <= most < 0.02


def test_using_an_entry_twice_gives_the_same_values() -> None:
    model = Net(2)
    activations = engine(model)
    activations.begin(Schedule([Choice.MOVE] * 10_000, [0.0]))
    with activations.hooks():
        loss = loss_of(model, 1)
        first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        second = torch.autograd.grad(loss, list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert activations.account.bytes_in > 0


def test_a_coded_copy_counts_while_it_moves_and_coding_takes_its_time() -> None:
    """One entry of 800 bytes that moves as 200: on the books, on the clock and on the link."""
    entry = EntryProfile(800, stored=200, coding=0.5)
    events = [Event("save", 0, 1.0, 0), Event("use", 0, 10.0, 0), Event("free", 0, 1.0, 0)]
    profile = PassProfile([entry], events)
    outcome = simulate(profile, [Choice.MOVE], Link(100.0, 100.0, 0.0), 1e9)
    assert (outcome.account.bytes_out, outcome.account.bytes_in) == (200, 200)
    assert outcome.account.peak == 1000
    assert outcome.account.coding == 1.0
    assert outcome.account.read_stall == 2.0
    assert outcome.seconds == 12.0 + 1.0 + 2.0
    exact = PassProfile([EntryProfile(800)], events)
    assert simulate(exact, [Choice.MOVE], Link(100.0, 100.0, 0.0), 1e9).account.read_stall == 8.0
    assert exact.beta(1.0) == 4 * profile.beta(1.0)


def managed(tmp_path: Path, **fields: str) -> tuple[MemoryManager, list[list[Tensor]]]:
    if CountingAllocator.installed() is None:
        CountingAllocator.install(caching=True)
    allocator = CountingAllocator.installed()
    assert allocator is not None
    torch.manual_seed(0)
    model = Net()
    gradients(model, 0)
    live = allocator.live
    allocator.reset_peak()
    gradients(model, 0)
    config = MemoryConfig(budget=live + (allocator.peak - live) * 7 // 10, min_bytes=4096, **fields)
    manager = MemoryManager(model, config, DiskTier(tmp_path, 1 << 26), device_meter(CPU), CPU, recompute=False)
    with manager:
        found = [gradients(model, 0) for _ in range(4)]
    return manager, found


def test_under_the_manager_fewer_bytes_move_and_the_error_is_told(tmp_path: Path) -> None:
    exact, wants = managed(tmp_path)
    coded, got = managed(tmp_path, saved_tensors="int8")
    assert all(torch.equal(a, b) for want in wants[1:] for a, b in zip(want, wants[0], strict=True))
    assert all(0.0 < relative(each, wants[0]) < 0.02 for each in got)
    assert [report.way for report in coded.passes] == ["recorded", "planned", "planned", "planned"]
    for report in list(coded.passes)[1:]:
        assert report.coding_error is not None
        assert 0.0 < report.coding_error[0] <= report.coding_error[1] < 0.02
        plan = next(iter(coded.plans.values()))
        moved = [e for e, c in zip(plan.profile.entries, plan.choices, strict=True) if c is Choice.MOVE]
        assert report.account.bytes_out <= sum(entry.moved for entry in moved) < sum(entry.nbytes for entry in moved)
        assert report.peak <= 1.05 * coded.budget
    row = metrics_of(list(coded.passes))
    assert row["memory_coding_error_max"] >= row["memory_coding_error"] > 0
    assert row["memory_coding_seconds"] > 0
    assert not any("coding" in name for name in metrics_of(list(exact.passes)))
    assert summary(coded)["saved_tensors"] == "int8"
    assert summary(coded)["passes"][1]["coding_error"] is not None
    for manager in exact, coded:
        assert manager.tier.used == manager.activations.books.resident == 0
        manager.close()


def test_the_sample_goes_round() -> None:
    errors, codec = CodingErrors(), Int8(torch.float32, 400)
    storage = torch.randn(100).untyped_storage()
    coded = codec.encode(storage)
    counts = []
    for _ in range(8):
        errors.begin()
        assert errors.mean_and_most() is None
        for _ in range(16):
            errors.see(codec, coded, storage)
        counts.append(len(errors._found))
    assert counts == [3, 3, 3, 3, 3, 3, 3, 2]
