"""A slow link is answered on all ranks at the same step, once, and taken back once."""

from __future__ import annotations

import copy
import pickle
import random
from itertools import pairwise

import pytest
from adapting import Cluster
from hypothesis import given, settings
from hypothesis import strategies as st

from laneway.cluster.costs.curves import Curve
from laneway.cluster.costs.measured import MeasuredNetwork
from laneway.cluster.probe.ladder import choose_step, ladder, link_load, slowed
from laneway.cluster.probe.locate import Link
from laneway.cluster.reduce.scheme import FLAT, LevelScheme, ReductionScheme, SchemeTable
from laneway.core import LanewayError

FEW = [(rack, host) for rack in range(2) for host in range(2)]
POSITIONS = [(rack, host) for rack in range(3) for host in range(2) for _ in range(2)]
LEVELS = ReductionScheme((LevelScheme(),) * 3, 1 << 20)
TABLE = SchemeTable(((0, FLAT), (1 << 17, LEVELS)))
RACK, HOST = Link(2, (4, 5, 6, 7)), Link(1, (2, 3))
GOOD = 12


@pytest.mark.parametrize("probing", [True, False])
@pytest.mark.parametrize("base", [LEVELS, TABLE])
@pytest.mark.parametrize("link", [RACK, HOST])
def test_slow_then_well(link, base, probing):
    cluster = Cluster(POSITIONS, base, probing=probing)
    assert set(cluster.run(GOOD)) == {str(base)}
    cluster.slow[link] = 10.0
    before = cluster.seconds(link)
    schemes = cluster.run(8)
    assert schemes[0] == str(base)
    assert schemes[1] == schemes[-1] != str(base)  # seen in one step, answered in the next
    assert cluster.seconds(link) < 0.7 * before
    cluster.slow.clear()
    schemes = cluster.run(12)
    assert schemes[-1] == str(base)
    assert sum(a != b for a, b in pairwise(schemes)) == 1
    assert {adapter.switches for adapter in cluster.adapters} == {2}
    down, up = cluster.events[0][2], cluster.events[-1][2]
    assert (down["was"], down["state"], up["was"], up["state"]) == ("up", "degraded", "degraded", "up")
    named = [fields["link"] for _, _, fields in cluster.events]
    assert (str(link) in named) if probing or link == HOST else (str(link) in named[0])  # a group of all racks tells none apart
    assert (down["from"], up["to"]) == (str(base), str(base))


def test_a_level_inside_a_host_is_told_of_and_not_answered():
    cluster = Cluster(POSITIONS, LEVELS)
    cluster.run(GOOD)
    cluster.slow[Link(0, (3,), True)] = 10.0
    assert set(cluster.run(6)) == {str(LEVELS)}
    assert "rank 2 inside its host or rank 3 inside its host" in [fields["link"] for _, _, fields in cluster.events]


def test_flat_goes_over_levels():
    cluster = Cluster(POSITIONS, FLAT)
    cluster.run(GOOD)
    cluster.slow[RACK] = 3.0
    assert "all_to_all" in cluster.run(8)[-1]
    cluster.slow.clear()
    assert cluster.run(12)[-1] == "flat"


def test_dropping_ends_with_a_release():
    cluster = Cluster(POSITIONS, LEVELS, dropping=True)
    cluster.run(GOOD)
    cluster.slow[RACK] = 30.0
    assert cluster.run(8)[-1].endswith("all_to_all:bf16-0.9 / 1048576")
    assert {reducer.dropper.released for reducer in cluster.reducers} == {0}
    cluster.slow.clear()
    cluster.run(12)
    assert cluster.scheme == LEVELS
    assert {reducer.dropper.released for reducer in cluster.reducers} == {1}


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10**6))
def test_a_noisy_network_changes_nothing(seed):
    cluster, draw = Cluster(FEW, LEVELS), random.Random(seed)
    cluster.noise = lambda: 1 / draw.uniform(0.8, 1.2)
    assert set(cluster.run(60)) == {str(LEVELS)}
    assert cluster.events == []


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.5, 1.5))
def test_whatever_the_noise_changes_are_few(seed, spread):
    cluster, draw = Cluster(FEW, LEVELS), random.Random(seed)
    cluster.noise = lambda: draw.lognormvariate(0, spread)
    schemes = cluster.run(60)
    assert sum(a != b for a, b in pairwise(schemes)) <= 12


def test_a_saved_state_decides_as_the_one_it_was_saved_from():
    one, other = Cluster(FEW, LEVELS), Cluster(FEW, LEVELS)
    one.run(GOOD)
    one.slow[Link(2, (2, 3))] = other.slow[Link(2, (2, 3))] = 10.0
    one.run(4)
    state = pickle.loads(pickle.dumps(one.adapters[0].state_dict()))
    for adapter in other.adapters:
        adapter.load_state_dict(copy.deepcopy(state))
    assert other.scheme == one.scheme != LEVELS
    one.slow.clear()
    other.slow.clear()
    assert other.run(20)[-1] == one.run(20)[-1] == str(LEVELS)


def test_ranks_that_decide_differently_are_told():
    cluster = Cluster(POSITIONS, LEVELS)
    cluster.run(3)
    cluster.reducers[2].scheme = FLAT
    for adapter in cluster.adapters:
        adapter.on_backward_end(cluster.step)
    cluster._share()
    with pytest.raises(LanewayError, match="decided differently in step 3"):
        cluster.adapters[0].on_step_begin(4)


def test_without_room_among_the_statistics():
    cluster = Cluster(POSITIONS, LEVELS)
    cluster.adapters[0]._statistics = None
    with pytest.raises(LanewayError, match="share"):
        cluster.adapters[0].on_step_begin(1)


def test_loads_are_those_of_the_formulas():
    """Flat 2(W−1)/W on every link; over levels 2(R−1)/R on an uplink of R racks, 2(n−1)/n + 2(R−1)/(R n) on one of n hosts."""
    sizes = (2, 4, 3)
    assert link_load(FLAT, sizes, 2) == pytest.approx(2 * 23 / 24)
    assert link_load(LEVELS, sizes, 2) == pytest.approx(2 * 2 / 3)
    assert link_load(LEVELS, sizes, 1) == pytest.approx(2 * 3 / 4 + 2 * 2 / 3 / 4)
    half = ReductionScheme((LevelScheme(), LevelScheme(), LevelScheme(wire="bf16")))
    assert link_load(half, sizes, 2) == pytest.approx(2 / 3)


NETWORK = MeasuredNetwork(
    ("L1", "L2", "L3"),
    (2, 2, 2),
    (Curve(1e-4, 1e-9), Curve(1e-3, 1.3e-8), Curve(1e-3, 5.5e-8)),
    Curve(1e-2, 1e-7),
    {"add": 1e-10, "bf16_encode": 2e-10, "bf16_decode": 2e-10, "int8_encode": 2e-9, "int8_decode": 2e-9},
)


def test_the_mildest_step_that_makes_up_for_it():
    steps = ladder(LEVELS, {2}, 3, algorithms=True)
    chosen = [str(choose_step(steps, {2: ratio}, NETWORK.sizes, measured=NETWORK).scheme) for ratio in (1.0, 2.0, 8.0)]
    assert chosen[0] == str(LEVELS)
    assert chosen[1].endswith("bf16 / 1048576")
    assert chosen[2].endswith("int8 / 1048576")
    assert slowed(NETWORK, {2: 3.0}).levels[2].seconds(1e6) == pytest.approx(1e-3 + 3 * 5.5e-2)


@given(st.integers(0, 2), st.booleans(), st.sampled_from([LEVELS, TABLE, FLAT]), st.booleans())
def test_ladders_keep_small_vectors_and_inner_levels(level, algorithms, base, drop):
    steps = ladder(base, {level}, 3, algorithms=algorithms, drop=drop and level == 2)
    assert steps[0].scheme == base
    loads = [link_load(step.main, (2, 2, 2), max(level, 1)) for step in steps if not algorithms]
    assert loads == sorted(loads, reverse=True)
    for step in steps:
        if isinstance(base, SchemeTable):
            assert step.scheme.at(100) == FLAT
        assert all(part == LevelScheme() for part in step.main.levels[:level])
        assert level or step.main.levels[1:] in ((), LEVELS.levels[1:]) or step.main.levels[-1].drop
