"""Which modules may be computed again, and which blocks checkpointed: those that are functions of their inputs, no more."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from laneway.memory.activations import Activations
from laneway.memory.clock import VirtualClock, WallClock
from laneway.memory.extents import storages
from laneway.memory.record import Recorder
from laneway.memory.residency import Choice, Schedule
from laneway.memory.simulated import SimulatedTier
from laneway.memory.watch import Watch, find_blocks


class Still:
    """A meter that sees nothing."""

    def live(self) -> int:
        return 0

    peak = capacity = live

    def reset_peak(self) -> None:
        pass


class Counts(nn.Module):
    """A leaf with a memory."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * 2


class Remembers(nn.Module):
    """A leaf that keeps a list."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(1.0)
        return x.sin()


class Bag(nn.Module):
    """All kinds of leaves, each followed by something that saves its output."""

    def __init__(self) -> None:
        super().__init__()
        self.gelu, self.norm, self.drop = nn.GELU(), nn.LayerNorm(8), nn.Dropout(0.5)
        self.batch, self.counts, self.remembers, self.inplace = nn.BatchNorm1d(8), Counts(), Remembers(), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.gelu(x.exp())
        x = self.norm(x.sin())
        x = self.drop(x.sin())
        x = self.batch(x.sin())
        x = self.counts(x.sin())
        x = self.remembers(x.sin())
        x = self.inplace(x.sin() + 1)
        return (x * x).sum()


def engine(model: nn.Module) -> Activations:
    clock = VirtualClock()
    held = storages([*model.parameters(), *model.buffers()])
    tier = SimulatedTier(clock, 1 << 40, 1e9, 1e9)
    return Activations(tier, clock, torch.device("cpu"), min_bytes=1, protected=lambda t: held.get(t) is not None)


def record(model: nn.Module, x: Tensor):
    activations = engine(model)
    recorder = Recorder(activations.books, Still(), WallClock())
    watch = Watch(model, activations, find_blocks(model))
    watch.record(recorder)
    activations.begin(Schedule())
    activations.observer = recorder
    with activations.hooks():
        model(x).backward()
    watch.clear()
    return recorder.finish()


def test_only_pure_leaves_are_computed_again_and_recording_has_no_side_effect():
    torch.manual_seed(0)
    model, x = Bag(), torch.randn(16, 8, requires_grad=True)
    other, y = copy.deepcopy(model), x.detach().clone().requires_grad_()
    torch.manual_seed(1)
    other(y).backward()
    want = torch.rand(())
    torch.manual_seed(1)
    profile = record(model, x)
    assert torch.rand(()) == want
    assert torch.equal(x.grad, y.grad)
    assert (model.counts.calls, len(model.remembers.seen)) == (1, 1)
    assert torch.equal(model.batch.running_var, other.batch.running_var)
    able = {entry.name for entry in profile.entries if entry.seconds is not None}
    assert "gelu" in able
    assert not able & {"drop", "batch", "counts", "remembers", "inplace"}


class Block(nn.Module):
    def __init__(self, extra: nn.Module) -> None:
        super().__init__()
        self.up, self.extra, self.down = nn.Linear(8, 32), extra, nn.Linear(32, 8)

    def forward(self, x: Tensor, scale: float = 1.0, box: list[Tensor] | None = None) -> Tensor:
        if box is not None:
            x = x + box[0]
        return x + scale * self.down(self.extra(self.up(x).exp()).tanh())


class Stack(nn.Module):
    def __init__(self, extra: type[nn.Module], *args: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(extra(*args)) for _ in range(3))
        self.box: list[Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, scale=0.5, box=self.box)
        return (x * x).sum()


@pytest.mark.parametrize(
    ("extra", "args", "pure"), [(nn.GELU, (), True), (nn.Dropout, (0.3,), True), (nn.BatchNorm1d, (32,), False)]
)
def test_blocks_with_running_statistics_are_not_checkpointed(extra, args, pure):
    profile = record(Stack(extra, *args), torch.randn(4, 8, requires_grad=True))
    assert [block.name for block in profile.blocks] == ["layers.0", "layers.1", "layers.2"]
    assert (any(entry.block is not None for entry in profile.entries)) == pure


def test_blocks_that_are_given_more_than_tensors_are_left_alone():
    model = Stack(nn.GELU)
    model.box = [torch.randn(4, 8)]
    profile = record(model, torch.randn(4, 8, requires_grad=True))
    assert all(entry.block is None for entry in profile.entries)


def test_checkpointed_and_recomputed_passes_have_the_same_gradients_and_leave_no_hook():
    torch.manual_seed(0)
    model, x = Stack(nn.Dropout, 0.3), torch.randn(4, 8)
    torch.manual_seed(1)
    model(x).backward()
    want = [p.grad.clone() for p in model.parameters()]
    for blocks, choice in (((0, 1, 2), Choice.KEEP), ((1,), Choice.MOVE)):
        model.zero_grad()
        activations = engine(model)
        watch = Watch(model, activations, find_blocks(model))
        watch.follow(set(), blocks)
        activations.begin(Schedule([choice] * 99, [0.0]))
        torch.manual_seed(1)
        with activations.hooks():
            model(x).backward()
        watch.clear()
        assert all(torch.equal(p.grad, w) for p, w in zip(model.parameters(), want, strict=True))
        assert all("forward" not in layer.__dict__ for layer in model.layers)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
