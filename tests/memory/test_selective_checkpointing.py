"""Selective activation checkpointing under the manager: what is kept moves, the rest is made again, and not a bit differs."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from laneway.memory.activations import Activations
from laneway.memory.clock import VirtualClock
from laneway.memory.config import MemoryConfig
from laneway.memory.counting import CountingAllocator
from laneway.memory.disk import DiskTier
from laneway.memory.extents import storages
from laneway.memory.manager import MemoryManager
from laneway.memory.meter import device_meter
from laneway.memory.residency import Choice, Schedule
from laneway.memory.simulated import SimulatedTier

WIDTH = 64
CPU = torch.device("cpu")


def keep_the_way_down(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """The second product of each block, and its random numbers."""
    product = op is torch.ops.aten.addmm.default and args[2].shape[1] == WIDTH
    drawn = op is torch.ops.aten.native_dropout.default and args[0].shape[-1] == WIDTH
    return CheckpointPolicy.MUST_SAVE if product or drawn else CheckpointPolicy.PREFER_RECOMPUTE


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU()
        self.drop, self.down = nn.Dropout(0.2), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(self.drop(self.act(self.up(self.norm(x))))))


class Net(nn.Module):
    def __init__(self, layers: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        contexts = functools.partial(create_selective_checkpoint_contexts, keep_the_way_down)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        return F.linear(x, self.embedding.weight)


def gradients(model: Net, seed: int) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    tokens = torch.randint(0, 40, (8, 48))
    F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    return [p.grad.clone() for p in model.parameters()]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("choice", [Choice.KEEP, Choice.MOVE])
@pytest.mark.parametrize("allowance", [0.0, 1e5, float("inf")])
def test_each_choice_gives_the_same_bits(choice: Choice, allowance: float) -> None:
    model, seed = Net(2), int(torch.randint(1 << 30, ()))
    want = gradients(model, seed)
    clock, held = VirtualClock(), storages(model.parameters())
    tier = SimulatedTier(clock, 1 << 40, 1e6, 1e6)
    activations = Activations(tier, clock, CPU, min_bytes=1, protected=lambda t: held.get(t) is not None)
    activations.begin(Schedule([choice] * 10_000, [allowance]))
    with activations.hooks():
        got = gradients(model, seed)
    assert equal(got, want)
    assert activations.alive == activations.books.resident == 0
    assert activations.account.writes + activations.account.cancelled > 0 or choice is Choice.KEEP


@pytest.mark.parametrize("way", ["planned", "reactive"])
def test_recorded_planned_and_reactive_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    if CountingAllocator.installed() is None:
        CountingAllocator.install(caching=True)
    allocator = CountingAllocator.installed()
    assert allocator is not None
    seed = int(torch.randint(1 << 30, ()))
    plain, managed = Net(), Net()
    managed.load_state_dict(plain.state_dict())
    wants = [gradients(plain, seed + step) for step in range(5)]
    gradients(managed, seed)
    live = allocator.live
    allocator.reset_peak()
    gradients(managed, seed)
    budget = live + (allocator.peak - live) * 5 // 6
    config = MemoryConfig(budget=budget, min_bytes=4096)
    manager = MemoryManager(managed, config, DiskTier(tmp_path, 1 << 26), device_meter(CPU), CPU)
    if way == "reactive":
        monkeypatch.setattr(manager, "_current_plan", lambda signature: None)
    with manager:
        for step, want in enumerate(wants):
            assert equal(gradients(managed, seed + step), want), step
    ways = [report.way for report in manager.passes]
    assert ways == ["recorded", *(["planned"] * 4 if way == "planned" else ["recorded"] * 4)]
    assert sum(report.account.bytes_out > 0 for report in manager.passes) >= (4 if way == "planned" else 1)
    if way == "planned":
        (plan,) = manager.plans.values()
        assert plan.feasible
        assert all(report.peak <= 1.05 * budget for report in list(manager.passes)[1:])
    assert manager.tier.used == manager.activations.books.resident == manager.activations.alive == 0
    manager.close()
