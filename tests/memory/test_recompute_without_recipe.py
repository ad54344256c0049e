"""A pass that is computed otherwise than its plan was made for, with saved tensors of the same sizes: kept, and right."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laneway.memory.activations import Activations
from laneway.memory.clock import VirtualClock
from laneway.memory.config import MemoryConfig
from laneway.memory.extents import storages
from laneway.memory.manager import MemoryManager
from laneway.memory.plan import Plan, make_plan
from laneway.memory.profile import PassProfile
from laneway.memory.residency import Choice, Schedule
from laneway.memory.simulate import Link, simulate
from laneway.memory.simulated import SimulatedTier
from laneway.memory.watch import Watch

WIDTH = 24


class Net(nn.Module):
    """Layers whose activation is a module, or the same function called past it; or one that draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.acts = nn.ModuleList(Act() for _ in range(4))
        self.past = False

    def forward(self, x: Tensor) -> Tensor:
        for layer, act in zip(self.layers, self.acts, strict=True):
            x = act.function(layer(x)) if self.past else act(layer(x))
        return x


class Act(nn.Module):
    noisy = False

    def function(self, x: Tensor) -> Tensor:
        return F.gelu(x).add_(torch.randn(()) if self.noisy else 1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def gradients(model: Net, seed: int) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(16, WIDTH, generator=generator)
    torch.manual_seed(seed)
    F.mse_loss(model(x), x.roll(1, 0)).backward()
    return [p.grad.clone() for p in model.parameters()]


def engine(model: nn.Module) -> Activations:
    clock, held = VirtualClock(), storages(model.parameters())
    tier = SimulatedTier(clock, 1 << 40, 1e6, 1e6)
    return Activations(tier, clock, torch.device("cpu"), min_bytes=1, protected=lambda t: held.get(t) is not None)


def test_an_entry_that_nobody_can_compute_again_is_kept():
    model = Net()
    want = gradients(model, 0)
    activations = engine(model)
    activations.begin(Schedule([Choice.RECOMPUTE] * 100, [0.0]))
    with activations.hooks():
        got = gradients(model, 0)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert activations.account.recomputed == 0
    assert {entry.choice for entry in activations.books.entries} == {Choice.KEEP}
    assert activations.books.resident == activations.alive == 0


class Everything:
    """A meter that has seen nothing; budgets are then those of the plan."""

    def live(self) -> int:
        return 0

    peak = live

    def reset_peak(self) -> None:
        pass

    def capacity(self) -> int:
        return 1 << 40


def recomputing(profile: PassProfile, budget: float, link: Link, **options: object) -> Plan:
    """The plan that computes all activations again, whatever it costs."""
    plan = make_plan(profile, budget, link)
    choices = [Choice.RECOMPUTE if entry.name.startswith("acts") else Choice.KEEP for entry in profile.entries]
    assert choices.count(Choice.RECOMPUTE) >= 3
    outcome = simulate(profile, choices, link, float("inf"))
    return Plan(tuple(choices), (), profile, budget, True, "as told", outcome, plan.unmanaged, plan.beta, 1)


@pytest.mark.parametrize("change", ["past the module", "random numbers in it"])
def test_a_planned_pass_of_another_graph_with_equal_sizes(monkeypatch, change):
    monkeypatch.setattr("laneway.memory.manager.make_plan", recomputing)
    plain, managed = Net(), Net()
    managed.load_state_dict(plain.state_dict())
    clock = VirtualClock()
    manager = MemoryManager(
        managed, MemoryConfig(budget=1 << 30, min_bytes=1), SimulatedTier(clock, 1 << 40, 1e6, 1e6), Everything(),
        torch.device("cpu"), clock=clock,
    )  # fmt: skip
    with manager:
        for step in range(5):
            for model in (plain, managed):
                model.past = step in (2, 4) and change == "past the module"
                for act in model.acts:
                    act.noisy = step in (2, 4) and change != "past the module"
            with manager.paused():
                want = gradients(plain, step)
            got = gradients(managed, step)
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), step
    ways = [(report.way, report.account.recomputed > 0) for report in manager.passes]
    assert ways[:3] == [("recorded", False), ("planned", True), ("strayed", False)], ways
    assert not any(act._forward_hooks for act in managed.acts)
    manager.close()


class Shared(nn.Module):
    """One module in several places, told by its parent which one it is in."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.act = Scaled()

    def forward(self, x: Tensor) -> Tensor:
        for place, layer in enumerate(self.layers):
            self.act.place, self.act.scales[0] = place, 0.5 + place
            x = self.act(layer(x))
        return x


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.place, self.scales = 0, [0.0]

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x).mul_(self.scales[0]).add_(self.place)


def run_again(model: nn.Module, meddle: bool = False) -> tuple[list[Tensor], Activations]:
    activations = engine(model)
    watch = Watch(model, activations, [])
    watch.follow({"act"}, [])
    activations.begin(Schedule([Choice.RECOMPUTE] * 100, [0.0]))
    model.zero_grad(set_to_none=True)
    with activations.hooks():
        x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(3))
        loss = F.mse_loss(model(x), x.roll(1, 0))
        watch.clear()
        if meddle:
            with torch.no_grad():
                model.act.bias.add_(1.0)
        loss.backward()
    return [p.grad.clone() for p in model.parameters()], activations


def test_a_module_runs_again_with_the_attributes_that_it_had():
    model = Shared()
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(3))
    F.mse_loss(model(x), x.roll(1, 0)).backward()
    want = [p.grad.clone() for p in model.parameters()]
    got, activations = run_again(model)
    assert activations.account.recomputed == 3
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert (model.act.place, model.act.scales) == (2, [2.5])


class Biased(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x) + self.bias


def test_a_parameter_written_since_is_not_computed_with():
    model = Shared()
    model.act = Biased()
    run_again(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run_again(model, meddle=True)
