"""Curves: smoothing has no lag and keeps gaps; thinning keeps every spike and the limit."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laneway.report.series import POINT_LIMIT, Curve


def curve(values) -> Curve:
    return Curve.of((list(range(len(values))), list(values)))


@given(st.lists(st.floats(width=32) | st.just(math.nan), min_size=0, max_size=400), st.integers(10, 60))
def test_thinning_keeps_extremes_order_and_limit(values, limit):
    thin = curve(values).thin(limit)
    finite = np.array([v for v in values if math.isfinite(v)])
    kept = thin.y[np.isfinite(thin.y)]
    assert len(kept) <= max(limit, 2)
    assert (np.diff(thin.x) > 0).all()
    if len(finite):
        assert kept.max() == finite.max()
        assert kept.min() == finite.min()


def test_a_single_spike_among_a_million_stays():
    values = np.ones(1_000_000)
    values[654_321] = 9.0
    thin = curve(values).thin()
    assert np.isfinite(thin.y).sum() <= POINT_LIMIT
    assert thin.x[thin.y.argmax()] == 654_321
    assert (thin.x[0], thin.x[-1]) == (0, 999_999)


def test_short_curves_are_left_alone():
    short = curve([3.0, 1.0, 2.0])
    assert short.thin() is short
    assert np.array_equal(short.smooth().y, short.y)


def test_gaps_split_segments_and_survive_thinning():
    values = np.ones(5000)
    values[2500:2600] = np.nan
    segments = list(curve(values).thin(200).segments())
    assert len(segments) == 2
    assert segments[0][0][-1] < 2500 <= 2600 <= segments[1][0][0]


def test_segments_of_nothing_and_of_isolated_points():
    assert list(curve([math.nan, math.inf]).segments()) == []
    assert [len(x) for x, _ in curve([1.0, math.nan, 2.0, 3.0, math.nan]).segments()] == [1, 2]


def test_smoothing_has_no_lag_and_less_noise():
    random = np.random.default_rng(0)
    x = np.arange(3000)
    truth = 5 * (1 + x / 50) ** -0.5
    smooth = curve(truth + random.normal(0, 0.1, 3000)).smooth()
    error = smooth.y - truth
    assert np.abs(error[60:]).max() < 0.08, "2 % where the curve is still steep"
    assert np.abs(error[300:]).max() < 0.04
    assert abs(error[60:].mean()) < 0.004, "a lag would show as a bias on a falling curve"


def test_smoothing_keeps_gaps_and_is_not_poisoned_by_a_huge_value():
    values = np.ones(1200)
    values[300], values[600] = math.nan, 1e22
    smooth = curve(values).smooth()
    assert math.isnan(smooth.y[300])
    assert np.allclose(smooth.y[:500][np.isfinite(smooth.y[:500])], 1.0)
    assert np.allclose(smooth.y[700:], 1.0), "a running total would lose the digits after 1e22"


def test_long_curves_are_smoothed_over_blocks():
    random = np.random.default_rng(1)
    smooth = curve(2.0 + random.normal(0, 1, 300_000)).smooth()
    assert len(smooth) == 6000
    assert np.abs(smooth.y - 2).max() < 0.2
    assert smooth.x[0] == pytest.approx(24.5)


def test_last_finite_value():
    assert curve([1.0, 2.0, math.nan]).last() == 2.0
    assert math.isnan(curve([math.nan]).last())
    assert not curve([math.nan]).drawable
