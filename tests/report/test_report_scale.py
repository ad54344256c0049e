"""Axes: ticks lie inside and are round, labels are distinct, scales survive hostile data."""

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from laneway.report.scale import Scale, linear_ticks, log_ticks, make_scale, scientific, tick_label, tick_labels

FINITE = st.floats(min_value=-1e12, max_value=1e12, allow_nan=False)


@given(FINITE, st.floats(min_value=1e-6, max_value=1e12), st.integers(3, 8))
def test_linear_ticks_are_round_inside_and_evenly_spaced(low, span, count):
    high = low + span
    if high - low < 1e-7 * max(abs(low), abs(high)):
        return  # the range is below what floats of this size resolve
    ticks = linear_ticks(low, high, count)
    slack = 1e-6 * (high - low)
    assert all(low - slack <= tick <= high + slack for tick in ticks)
    assert 1 <= len(ticks) <= 2 * count + 2
    if len(ticks) > 2:
        steps = np.diff(ticks)
        assert np.allclose(steps, steps[0], rtol=1e-4)
        mantissa = steps[0] / 10 ** math.floor(math.log10(steps[0]) + 1e-6)
        assert min(abs(mantissa - m) for m in (1, 2, 5)) < 1e-3


@given(st.floats(min_value=1e-12, max_value=1e12), st.floats(min_value=1.06, max_value=1e20))
def test_log_ticks_lie_inside_and_rise(low, ratio):
    ticks = log_ticks(low, low * ratio)
    assert all(low * (1 - 1e-6) <= tick <= low * ratio * (1 + 1e-6) for tick in ticks)
    assert ticks == sorted(set(ticks))


@pytest.mark.parametrize(
    ("low", "high", "log", "labels"),
    [
        (0, 1050, False, ["0", "200", "400", "600", "800", "1k"]),
        (1.2, 5.7, False, ["2", "3", "4", "5"]),
        (-0.2, 1, False, ["−0.2", "0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        (0, 23456, False, ["0", "5k", "10k", "15k", "20k"]),
        (0, 2e-3, False, ["0", "5e−4", "1e−3", "1.5e−3", "2e−3"]),
        (1, 3e5, True, ["1", "10", "100", "1k", "10k", "100k"]),
        (1e-7, 1e-2, True, ["1e−7", "1e−6", "1e−5", "1e−4", "1e−3", "1e−2"]),
        (0.9, 40, True, ["1", "2", "5", "10", "20"]),
    ],
)
def test_labels_as_a_person_writes_them(low, high, log, labels):
    assert tick_labels(Scale(low, high, 0, 100, log).ticks(), log) == labels


@given(FINITE, st.floats(min_value=1e-3, max_value=1e9))
@example(99716666667.0, 333333333.0)
@example(1_200_000.0, 500.0)
def test_labels_of_one_axis_differ(low, span):
    if span < 1e-9 * abs(low):
        return  # labels would need more than nine digits
    ticks = linear_ticks(low, low + span)
    labels = tick_labels(ticks, False)
    assert len(set(labels)) == len(labels)


def test_a_label_for_every_size():
    assert tick_label(1_500_000) == "1.5M"
    assert tick_label(2e21) == "2e21"
    assert tick_label(-4e-7) == "−4e−7"
    assert scientific(2.5e-4) == "2.5e−4"


def test_scale_maps_ends_and_clamps():
    scale = Scale(0, 10, 50, 250)
    assert (scale(0), scale(10), scale(5), scale(99), scale(-99)) == (50, 250, 150, 250, 50)
    log = Scale(1, 100, 0, 200, log=True)
    assert log(10) == pytest.approx(100)


def test_log_is_chosen_by_the_span_of_positive_data():
    assert make_scale([np.array([1.0, 1000.0])], (0, 1)).log
    assert not make_scale([np.array([1.0, 20.0])], (0, 1)).log
    assert not make_scale([np.array([-1.0, 1000.0])], (0, 1)).log
    assert not make_scale([np.array([0.0, 1000.0])], (0, 1)).log
    assert make_scale([np.array([1.0, 1000.0])], (0, 1), low=0.0).log, "a floor of zero must not undo the logarithm"
    assert not make_scale([np.array([1.0, 1000.0])], (0, 1), log=False).log
    assert not make_scale([np.array([0.0, 2.0])], (0, 1), log=True).log, "zero has no logarithm"


@pytest.mark.parametrize(
    "values", [[], [math.nan], [math.inf, -math.inf], [0.0], [5.0, 5.0], [1e308, -1e308], [1e-320, 1.0], [1e300, 1.0]]
)
@pytest.mark.parametrize("log", [None, True, False])
def test_any_data_gives_a_usable_scale(values, log):
    scale = make_scale([np.array(values, dtype=float)], (10, 200), log=log, least_span=0.01)
    assert math.isfinite(scale.low)
    assert scale.high > scale.low
    for value in (scale.low, scale.high, *[v for v in values if math.isfinite(v)]):
        assert 10 - 1e-6 <= scale(value) <= 200 + 1e-6
    assert all(math.isfinite(tick) for tick in scale.ticks())


def test_asked_ends_stay_ends_and_least_span_grows_away_from_them():
    gain = make_scale([np.array([1.0, 1.0])], (0, 1), low=1.0, least_span=0.1)
    assert gain.low == 1.0
    assert 1.1 <= gain.high <= 1.11
    cosine = make_scale([np.array([0.9999])], (0, 1), high=1.0, least_span=0.02)
    assert cosine.high == 1.0
    assert cosine.low < 0.981
