"""States with hysteresis, whatever the noise."""

from __future__ import annotations

import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laneway.cluster.probe.health import DEGRADED, DOWN, UP, Baseline, Health, Rules
from laneway.core import InputError

ratios = st.lists(st.floats(0.1, 1000.0) | st.just(math.nan), max_size=400)


@given(ratios)
def test_any_noise_brings_few_changes(seen):
    health, rules = Health(), Rules()
    recoveries = sum((change := health.observe(ratio)) is not None and change.after == UP for ratio in seen)
    assert recoveries <= math.log2(len(seen) / rules.recover + 1) + 1


@given(st.lists(st.floats(0.8, 1.25), min_size=30, max_size=200), st.integers(0, 10**6))
def test_a_rate_that_jitters_changes_nothing(rates, seed):
    health, baseline, draw = Health(), Baseline(), random.Random(seed)
    for rate in rates:
        value = draw.uniform(0.97, 1.03) / rate
        assert health.observe(baseline.ratio(value)) is None
        baseline.add(value)
    assert health.state == UP


@given(st.floats(2.05, 150.0), st.integers(5, 60), st.integers(3, 60))
def test_slow_then_well_again_is_two_changes(ratio, slow, well):
    health = Health()
    seen = [health.observe(each) for each in [1.0] * 9 + [ratio] * slow + [1.0] * well]
    changes = [change for change in seen if change is not None]
    assert [(change.before, change.after) for change in changes] == [(UP, DEGRADED), (DEGRADED, UP)]
    assert changes[0].ratio == ratio
    assert seen.index(changes[0]) - 9 == (0 if ratio >= Rules().severe else 1)


def test_one_observation_is_not_enough_unless_it_is_severe_and_sure():
    for ratio, sure, state in ((3.0, True, UP), (30.0, False, UP), (30.0, True, DEGRADED)):
        health = Health()
        health.observe(ratio, sure=sure)
        health.observe(1.0)
        assert health.state == state


def test_much_slower_is_a_change_of_its_own_and_so_is_less_slow():
    health = Health()
    grades = [change.ratio for ratio in [3.0] * 4 + [20.0] * 4 + [2.5] * 4 + [1.0] * 8 if (change := health.observe(ratio))]
    assert grades == [3.0, 20.0, 2.5, 1.0]


def test_down_and_up_again():
    health = Health(Rules(down=50.0))
    states = [change.after for ratio in [1.0, *[500.0] * 4, *[1.0] * 6] if (change := health.observe(ratio))]
    assert states == [DEGRADED, DOWN, UP] or states == [DOWN, UP]


@given(ratios, ratios)
def test_a_saved_state_goes_on_as_the_one_it_was_saved_from(before, after):
    one, other = Health(), Health()
    for ratio in before:
        one.observe(ratio)
    other.load(json.loads(json.dumps(one.to_dict())))
    assert [one.observe(ratio) for ratio in after] == [other.observe(ratio) for ratio in after]


def test_good_times_are_learned_and_a_noisy_link_has_wider_ones():
    calm, noisy = Baseline(learn=3), Baseline(learn=3)
    assert math.isnan(calm.ratio(1.0))
    for index in range(12):
        calm.add(1.0)
        noisy.add(3.0 if index % 3 == 0 else 1.0)
        calm.add(math.nan)
    assert calm.ratio(3.0) == 3.0
    assert noisy.ratio(3.0) == pytest.approx(1.35)


@pytest.mark.parametrize("bad", [{"restored": 2.5}, {"degraded": math.inf}, {"confirm": 0}, {"worse": 1.0}, {"severe": 1.9}])
def test_bad_rules(bad):
    with pytest.raises(InputError, match="rules"):
        Rules(**bad)
