"""Plans: within the budget, no slower than simpler ones, and none where nothing is to be gained."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laneway.core import InputError
from laneway.memory.plan import make_plan
from laneway.memory.profile import BlockProfile, EntryProfile, Event, PassProfile, checkpointed
from laneway.memory.residency import Choice
from laneway.memory.simulate import Link, simulate

MB = 10**6


def stack(layers: int, draw: random.Random, other: int = 20 * MB) -> PassProfile:
    """A pass as a stack of blocks makes it: per block an input, a norm's output (cheap again), a wide product and its GELU."""
    profile = PassProfile(static=other)
    sizes = {"input": 4 * MB, "norm": 4 * MB, "up": 16 * MB, "gelu": 16 * MB}
    for layer in range(layers):
        first = 4 * layer
        profile.blocks.append(BlockProfile(f"blocks.{layer}", 0.06, (first,)))
        profile.entries += [
            EntryProfile(sizes["input"], f"{layer}.input"),
            EntryProfile(sizes["norm"], f"{layer}.norm", 0.001, (first,), block=layer),
            EntryProfile(sizes["up"], f"{layer}.up", 0.03, (first + 1,), block=layer),
            EntryProfile(sizes["gelu"], f"{layer}.gelu", 0.004, (first + 2,), block=layer),
        ]
        profile.events += [Event("save", first + part, 0.015 * draw.uniform(0.8, 1.2), other) for part in range(4)]
    for entry in reversed(range(4 * layers)):
        profile.events.append(Event("use", entry, 0.015 * draw.uniform(0.8, 1.2), other))
        profile.events.append(Event("free", entry, 0.015, other + 4 * MB))
    return profile


@pytest.mark.parametrize("solver", ["greedy", "milp"])
@pytest.mark.parametrize("share", [0.8, 0.63, 0.5])
@pytest.mark.parametrize("bandwidth", [2e9, 4e8, 1e8])
def test_a_plan_keeps_its_budget_and_is_no_slower_than_moving_or_checkpointing_everything(solver, share, bandwidth):
    profile = stack(8, random.Random())
    budget, link = share * profile.peak, Link(bandwidth, bandwidth)
    plan = make_plan(profile, budget, link, solver=solver)
    assert plan.feasible
    assert plan.predicted.peak <= budget
    for blocks, choice in (((), Choice.MOVE), (range(8), Choice.KEEP)):
        other = checkpointed(profile, blocks)
        simple = simulate(other, [choice] * len(other.entries), link, budget)
        if solver == "greedy" and simple.peak <= budget:
            assert plan.predicted.seconds <= 1.01 * simple.seconds


def test_where_the_link_is_slow_it_computes_again_or_checkpoints():
    profile = stack(8, random.Random(1))
    fast, slow = (make_plan(profile, 0.6 * profile.peak, Link(b, b)) for b in (5e9, 5e7))
    assert fast.count(Choice.MOVE)[0] > 0
    assert fast.overhead < 0.01
    assert slow.count(Choice.RECOMPUTE)[0] > 0 or slow.blocks
    only_moves = make_plan(profile, 0.6 * profile.peak, Link(5e7, 5e7), recompute=False)
    assert not only_moves.blocks
    assert only_moves.count(Choice.RECOMPUTE)[0] == 0
    assert slow.overhead < 0.5 * only_moves.overhead


def test_it_declines_where_everything_fits_and_where_nothing_helps():
    profile = stack(4, random.Random())
    plan = make_plan(profile, profile.peak, Link(1e9, 1e9))
    assert (set(plan.choices), plan.reason) == ({Choice.KEEP}, "everything fits")
    lonely = PassProfile(
        [EntryProfile(MB)],
        [Event("save", 0, 0.1, 0), Event("use", 0, 0.1, 0), Event("free", 0, 0.1, 0), Event("save", 0, 0.1, 50 * MB)],
        static=0,
    )
    lonely.events.pop()
    lonely.events[0].other = 50 * MB  # the peak is before anything is saved
    plan = make_plan(lonely, 10 * MB, Link(1e9, 1e9))
    assert set(plan.choices) == {Choice.KEEP}
    assert not plan.feasible
    assert "nothing" in plan.reason


def test_what_cannot_be_reached_is_said():
    profile = stack(4, random.Random(), other=100 * MB)
    plan = make_plan(profile, 101 * MB, Link(1e9, 1e9))
    assert not plan.feasible
    assert plan.predicted.peak < profile.peak
    assert "no plan gets below" in plan.reason


def test_a_plan_holds_when_the_computation_is_faster_than_recorded():
    profile = stack(8, random.Random())
    budget, link = 0.6 * profile.peak, Link(1.2e9, 1.2e9)
    plan = make_plan(profile, budget, link)
    for speed in (1.0, 1.1, 1.15):
        assert simulate(plan.profile, plan.choices, link, budget, speed=speed).peak <= budget


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 6), st.integers(0, 2**31), st.sampled_from([0.4, 0.6, 0.8]), st.sampled_from([5e7, 1e9]))
def test_no_plan_uses_more_than_it_says(layers, seed, share, bandwidth):
    draw = random.Random(seed)
    profile = stack(layers, draw, other=draw.randrange(MB, 60 * MB))
    plan = make_plan(profile, share * profile.peak, Link(bandwidth, bandwidth, duplex=draw.random() < 0.5))
    assert max(nbytes for _, nbytes in plan.predicted.trace) == plan.predicted.peak
    assert plan.predicted.peak <= profile.peak
    assert plan.feasible == (plan.predicted.peak <= plan.budget)


def test_checkpointing_a_block_takes_its_entries_off_the_books_and_its_time_twice():
    profile = stack(3, random.Random())
    less = checkpointed(profile, (0, 2))
    assert [entry.name for entry in less.entries] == ["0.input", "1.input", "1.norm", "1.up", "1.gelu", "2.input"]
    assert less.seconds == pytest.approx(profile.seconds + 0.12)
    assert less.peak < profile.peak
    assert checkpointed(profile, ()).to_dict() == profile.to_dict()


def test_a_profile_survives_json():
    profile = stack(2, random.Random())
    assert PassProfile.from_dict(json.loads(json.dumps(profile.to_dict()))) == profile


def test_an_unknown_solver_is_refused():
    with pytest.raises(InputError, match="solver: got 'simplex'"):
        make_plan(stack(2, random.Random()), MB, Link(1e9, 1e9), solver="simplex")
