"""The manager around ordinary training: the same numbers, within the budget, planned after the first pass of each shape."""

from __future__ import annotations

import errno
import gc
import os

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laneway.core import InputError, LanewayError
from laneway.memory.config import MemoryConfig
from laneway.memory.counting import CountingAllocator
from laneway.memory.disk import DiskTier
from laneway.memory.manage import manage_memory
from laneway.memory.manager import MemoryManager
from laneway.memory.meter import device_meter

CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.act = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU()
        self.drop, self.down = nn.Dropout(0.1), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(self.act(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, width: int = 64, layers: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, tokens_bt: Tensor) -> Tensor:
        x = self.embedding(tokens_bt)
        for block in self.blocks:
            x = block(x)
        return F.linear(x, self.embedding.weight)


@pytest.fixture(scope="module")
def allocator() -> CountingAllocator:
    """This process's counting allocator; from now on every tensor of the process is counted."""
    found = CountingAllocator.installed()
    return found if found is not None else CountingAllocator.install(caching=True)


class Training:
    """A model, its optimizer and batches of chosen lengths."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.step = 0

    def __call__(self, length: int, micro_batches: int = 1) -> float:
        torch.manual_seed(self.step)  # of the dropout too
        generator = torch.Generator().manual_seed(self.step)
        self.step += 1
        total = 0.0
        for _ in range(micro_batches):
            tokens = torch.randint(0, 50, (8, length + 1), generator=generator)
            logits = self.model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / micro_batches
            loss.backward()
            total += loss.item()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total


def plain_peak(allocator: CountingAllocator, length: int) -> int:
    """Peak over what is there before, of a step of this length."""
    training = Training()
    for _ in range(2):
        training(length)
    allocator.reset_peak()
    training(length)
    return allocator.peak


def manager_for(training: Training, folder, budget: int, **options) -> MemoryManager:
    config = MemoryConfig(budget=str(budget), min_bytes=4096, **options)
    return MemoryManager(training.model, config, DiskTier(folder, 1 << 26), device_meter(CPU), CPU)


@pytest.mark.parametrize("policy", ["cost_aware", "lru", "fifo"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_training_is_bit_for_bit_that_without_it_and_stays_within_the_budget(tmp_path, allocator, policy, micro_batches):
    plain, managed = Training(), Training()
    lengths = [64, 64, 64, 96, 64, 96, 64]
    want = [plain(length, micro_batches) for length in lengths]
    allocator.reset_peak()
    live = allocator.live
    budget = live + int(0.7 * (plain_peak(allocator, 96) - live))
    manager = manager_for(managed, tmp_path, budget, policy=policy)
    got = []
    with manager:
        for length in lengths:
            got.append(managed(length, micro_batches))
            manager.end_pass()
    assert got == want
    for a, b in zip(plain.model.parameters(), managed.model.parameters(), strict=True):
        assert torch.equal(a, b)
    ways = [report.way for report in manager.passes]
    assert ways.count("recorded") == 2
    assert "planned" in ways
    assert all(report.peak <= 1.03 * budget for report in manager.passes if report.way == "planned")
    assert sum(report.account.bytes_out for report in manager.passes) > 0
    gc.collect()
    assert manager.activations.alive == 0
    assert manager.activations.books.resident == 0
    assert manager.tier.used == 0
    manager.close()


def test_the_predicted_peak_is_the_observed_one(tmp_path, allocator):
    training = Training()
    manager = manager_for(training, tmp_path, allocator.live + (4 << 20))
    with manager:
        for _ in range(6):
            training(64)
            manager.end_pass()
    planned = [report for report in manager.passes if report.way == "planned"]
    assert planned
    for report in planned[1:]:
        assert report.peak == pytest.approx(report.predicted, rel=0.03)
    manager.close()


def test_where_everything_fits_nothing_moves(tmp_path, allocator):
    training = Training()
    manager = manager_for(training, tmp_path, allocator.live + (1 << 30))
    with manager:
        for _ in range(3):
            training(64)
    assert manager.tier.traffic.writes == 0
    assert next(iter(manager.plans.values())).reason == "everything fits"
    manager.close()


def test_a_pass_unlike_its_plan_is_noticed_and_right(tmp_path, allocator):
    """The same shapes, another graph: every second block is skipped from the third step on."""
    results = []
    for managed in (False, True):
        training = Training()
        blocks = list(training.model.blocks)

        def run(training=training, blocks=blocks) -> list[float]:
            losses = []
            for step in range(6):
                training.model.blocks = nn.ModuleList(blocks if step < 3 else blocks[::2])
                losses.append(training(64))
            return losses

        if managed:
            manager = manager_for(training, tmp_path, allocator.live + (4 << 20))
            with manager:
                results.append(run())
            assert "strayed" in [report.way for report in manager.passes]
            assert manager.replanned >= 1
            manager.close()
        else:
            results.append(run())
    assert results[0] == results[1]


def test_a_disk_that_is_full_costs_no_step(tmp_path, allocator, monkeypatch):
    want, got = Training(), Training()
    losses = [want(64) for _ in range(4)]
    manager = manager_for(got, tmp_path, allocator.live + (4 << 20))
    with manager:
        found = [got(64)]

        def full(*args):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "pwrite", full)
        monkeypatch.setattr(os, "pwritev", full)
        found += [got(64), got(64)]
        monkeypatch.undo()
        found.append(got(64))
    assert found == losses
    assert sum(report.account.refused for report in manager.passes) > 0
    assert manager.activations.books.resident == 0
    manager.close()


def test_validation_between_steps_and_paused_work_are_left_alone(tmp_path, allocator):
    training = Training()
    manager = manager_for(training, tmp_path, allocator.live + (4 << 20))
    with manager:
        training(64)
        with torch.no_grad():
            training.model(torch.randint(0, 50, (2, 9)))
        with manager.paused():
            x = torch.randn(4096, requires_grad=True)
            y = (x * x).sum()
            assert manager.activations.alive == 0
            y.backward()
        training(64)
    assert [report.signature.length for report in manager.passes] == [64, 64]
    manager.close()


def test_on_twice_and_wrong_fields_are_refused(tmp_path, allocator):
    training = Training()
    with (
        manage_memory(training.model, budget="1GiB", folder=str(tmp_path)) as manager,
        pytest.raises(LanewayError, match="on already"),
    ):
        manager.__enter__()
    manager.close()
    with pytest.raises(InputError, match=r"memory\.policy"):
        manage_memory(training.model, budget="1GiB", policy="belady")
    with pytest.raises(InputError, match=r"memory\.budget"):
        manage_memory(training.model, budget="a lot")
    with pytest.raises(InputError, match=r"memory\.tiers.*did you mean 'tier'"):
        manage_memory(training.model, tiers="disk")
