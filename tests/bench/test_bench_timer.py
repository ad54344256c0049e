"""Order of the rounds, arithmetic of ratios and intervals: on clocks and samples made for the test."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laneway.bench.layer import scaled
from laneway.bench.stats import mean_interval, paired_ratio, quartiles, t_quantile
from laneway.bench.timer import Samples, interleave, ratio


class Clock:
    """Moves on only when a variant says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def timed(durations, **options):
    clock, order = Clock(), []

    def variant(name):
        def run():
            order.append(name)
            clock.now += durations[name]

        return run

    samples = interleave({name: variant(name) for name in durations}, clocks=(clock, clock), **options)
    return samples, order


def test_variants_take_turns_and_the_first_moves_on():
    samples, order = timed({"a": 1.0, "b": 2.0, "c": 3.0}, seconds=0, min_rounds=4, max_rounds=4, warmup=1)
    assert order[:3] == ["a", "b", "c"]
    assert "".join(order[3:]) == "abcbcacababc"
    assert samples["b"].wall_s == samples["b"].cpu_s == [2.0] * 4


def test_rounds_end_with_the_budget():
    samples, _ = timed({"a": 1.0, "b": 1.0}, seconds=10.0, min_rounds=2, max_rounds=100)
    assert len(samples["a"].wall_s) == 5


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=30), st.floats(0.5, 4.0))
def test_a_constant_ratio_is_found_exactly_whatever_the_rounds_cost(base, factor):
    interval = paired_ratio([factor * b for b in base], base)
    for value in (interval.value, interval.low, interval.high):
        assert value == pytest.approx(factor)


def test_a_slow_round_slows_both_sides():
    slow = Samples([1.0, 100.0, 1.0], [0] * 3), Samples([2.0, 200.0, 2.0], [0] * 3)
    assert ratio(slow[1], slow[0]).high == pytest.approx(2.0)


def test_the_interval_holds_the_median_and_grows_with_the_noise():
    calm = paired_ratio([2.0, 2.1, 1.9, 2.05, 1.95], [1.0] * 5)
    wild = paired_ratio([1.0, 4.0, 2.0, 0.5, 3.0], [1.0] * 5)
    assert calm.low <= calm.value <= calm.high
    assert wild.high - wild.low > calm.high - calm.low


def test_unpaired_samples_are_refused():
    with pytest.raises(ValueError, match="paired"):
        paired_ratio([1.0], [1.0, 2.0])


def test_quartiles_and_students_interval():
    assert quartiles([1, 2, 3, 4, 5]) == (2.0, 3.0, 4.0)
    interval = mean_interval([1.0, 2.0, 3.0])
    assert interval.value == 2.0
    assert interval.high - 2.0 == pytest.approx(4.303 / math.sqrt(3), rel=1e-3)
    assert mean_interval([1.0]).as_json() == {"value": 1.0, "low": None, "high": None}
    assert t_quantile(1000) == 1.960


def test_the_floor_is_copies_of_the_bytes_a_site_cannot_avoid():
    """n = 4: 42 numbers a token against the 8 that a copy of the streams moves."""
    assert scaled(Samples([8.0], [4.0]), 3 * (3 * 4 + 2) / (2 * 4)).wall_s == [42.0]
