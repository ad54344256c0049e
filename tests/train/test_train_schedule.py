"""Warm-up, peak, floor, and nothing strange between."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laneway.train.config import OptimizerConfig
from laneway.train.schedule import learning_rate


def test_the_landmarks():
    config = OptimizerConfig(lr=1.0, warmup=0.1, floor=0.2)
    rates = [learning_rate(config, step, 100) for step in range(1, 101)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == max(rates) == 1.0
    assert rates[54] == pytest.approx((1 + 0.2) / 2)  # half-way down the cosine
    assert rates[99] == pytest.approx(0.2)


def test_no_warm_up_starts_below_the_peak_of_the_cosine():
    config = OptimizerConfig(lr=2.0, warmup=0.0, floor=0.0)
    assert learning_rate(config, 1, 4) == pytest.approx(2.0 * 0.8535533905932737)
    assert learning_rate(config, 4, 4) == pytest.approx(0.0, abs=1e-12)


@given(
    steps=st.integers(1, 300),
    warmup=st.floats(0, 0.99),
    floor=st.floats(0, 1),
)
def test_it_rises_then_falls_and_stays_in_its_bounds(steps, warmup, floor):
    config = OptimizerConfig(lr=1.0, warmup=warmup, floor=floor)
    rates = [learning_rate(config, step, steps) for step in range(1, steps + 1)]
    peak = rates.index(max(rates))
    assert all(a < b for a, b in pairwise(rates[: peak + 1]))
    assert all(a >= b for a, b in pairwise(rates[peak:]))
    assert all(0 <= rate <= 1 + 1e-12 for rate in rates)
    assert rates[-1] == pytest.approx(floor if steps > int(warmup * steps) else 1.0)
