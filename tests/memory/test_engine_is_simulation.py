"""The engine that moves real tensors, on the simulation's clock: times, stalls, bytes, misses and order are the simulation's."""

from __future__ import annotations

import random
from dataclasses import asdict

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laneway.memory.activations import Activations
from laneway.memory.clock import VirtualClock
from laneway.memory.extents import storages
from laneway.memory.plan import make_plan
from laneway.memory.profile import PassProfile
from laneway.memory.record import Recorder
from laneway.memory.residency import Choice, Entry, Schedule
from laneway.memory.simulate import Link, allowances, simulate
from laneway.memory.watch import Watch, find_blocks


class Still:
    """A meter that sees the managed bytes and nothing else."""

    def __init__(self, activations: Activations) -> None:
        self.books = activations.books

    def live(self) -> int:
        return self.books.resident

    def peak(self) -> int:
        return self.books.resident

    def reset_peak(self) -> None:
        pass

    def capacity(self) -> int:
        return 1 << 40


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.act, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.GELU(),
            nn.Linear(3 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x)))).tanh()


def setup(link: Link, seed: int) -> tuple[nn.Module, Activations, Tensor]:
    torch.manual_seed(seed)
    model = nn.Sequential(*(Block(8) for _ in range(5)))
    held = storages(model.parameters())
    clock = VirtualClock()
    activations = Activations(
        link.tier(clock), clock, torch.device("cpu"), min_bytes=1, protected=lambda t: held.get(t) is not None
    )
    return model, activations, torch.randn(6, 8)


def backward(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    F.mse_loss(model(x), x.flip(0)).backward()
    return [p.grad.clone() for p in model.parameters()]


def recorded(link: Link, seed: int) -> PassProfile:
    """A real pass's profile, with times and unmanaged bytes as they might be."""
    model, activations, x = setup(link, seed)
    recorder = Recorder(activations.books, Still(activations), activations.books.clock)
    watch = Watch(model, activations, find_blocks(model))
    watch.record(recorder)
    activations.begin(Schedule())
    activations.observer = recorder
    with activations.hooks():
        backward(model, x)
    watch.clear()
    profile, draw = recorder.finish(), random.Random(seed)
    for event in profile.events:
        event.seconds, event.other = draw.expovariate(1e4), draw.randrange(200, 400)
    for entry in profile.entries:
        entry.seconds = None if entry.seconds is None else draw.expovariate(1e5)
    profile.tail = 0.0
    return profile


def engine(
    link: Link, seed: int, profile: PassProfile, choices, budget: float
) -> tuple[Activations, list[Tensor], list[Tensor], float]:
    model, activations, x = setup(link, seed)
    want = backward(model, x)
    clock, at = activations.books.clock, 0
    activations.begin(Schedule(choices, allowances(profile, budget), profile.order(), profile.held()))

    def tick(kind: str, entry: Entry) -> None:
        nonlocal at
        if kind == "again":
            return
        event = profile.events[at]
        assert (event.kind, event.entry) == (kind, entry.index)
        assert profile.entries[entry.index].nbytes == entry.nbytes
        clock.advance(event.seconds)
        at += 1

    activations.observer = tick
    recompute = activations.recompute

    def timed(entry: Entry) -> None:
        recompute(entry)
        clock.advance(profile.entries[entry.index].seconds)

    activations.books.hands = activations
    activations.recompute = timed
    watch = Watch(model, activations, [])
    watch.follow({name for name, _ in model.named_modules()}, [])
    with activations.hooks():
        got = backward(model, x)
    watch.clear()
    assert at == len(profile.events)
    return activations, got, want, clock.now()


@pytest.mark.parametrize("bandwidth", [3e5, 1e6, 1e7])
@pytest.mark.parametrize("duplex", [False, True])
@pytest.mark.parametrize("mix", ["move", "plan", "random"])
def test_engine_and_simulation_agree(bandwidth, duplex, mix):
    seed = int(torch.randint(1 << 30, ()))
    link = Link(bandwidth, 0.8 * bandwidth, 1e-5, duplex)
    profile = recorded(link, seed)
    assert any(entry.seconds is not None for entry in profile.entries)
    budget = 0.6 * profile.peak
    draw = random.Random(seed)
    if mix == "plan":
        choices = make_plan(without_blocks(profile), budget, link).choices
    elif mix == "move":
        choices = [Choice.MOVE] * len(profile.entries)
    else:
        choices = []
        for entry in profile.entries:
            able = entry.seconds is not None and all(choices[n] is not Choice.RECOMPUTE for n in entry.needs)
            choices.append(draw.choice([Choice.KEEP, Choice.MOVE, *([Choice.RECOMPUTE] * able)]))
    activations, got, want, seconds = engine(link, seed, profile, choices, budget)
    predicted = simulate(profile, choices, link, budget)
    assert activations.account.bytes_out > 0 or mix == "plan"
    assert asdict(activations.account) == asdict(predicted.account)
    assert seconds == predicted.seconds
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def without_blocks(profile: PassProfile) -> PassProfile:
    profile.blocks = []
    for entry in profile.entries:
        entry.block = None
    return profile
