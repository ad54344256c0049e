"""λ over a run: the linear schedule and the controller."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import laneway as lw
from laneway.connections.tuning import AutoSettings, AutoStrength, linear_strength

NUMBERS = st.floats(allow_nan=True, allow_infinity=True, width=32)
STEPS = st.lists(st.tuples(st.one_of(st.none(), NUMBERS), NUMBERS, NUMBERS), max_size=60)


def test_linear():
    strength = linear_strength(0.3, 0.9, 10)
    assert [round(strength(step), 3) for step in (0, 5, 10, 50)] == [0.3, 0.6, 0.9, 0.9]
    assert linear_strength(0.4)(10**6) == 0.4
    assert linear_strength(0.8, 0.2, 4)(3) == pytest.approx(0.35)
    for options, field in (((1.2,), "strength"), ((0.3, -1, 5), "final"), ((0.3, 0.5), "steps"), ((0.3, 0.5, 0), "steps")):
        with pytest.raises(lw.InputError, match=f"{field}: got"):
            linear_strength(*options)


QUICK = AutoSettings(fast=2, slow=4, wait=2)


@settings(max_examples=100, deadline=None)
@given(STEPS)
def test_it_stays_in_its_bounds_and_is_a_function_of_the_numbers(steps):
    """Two ranks that are given the same numbers agree, also when one of them was stopped and went on."""
    bounds = dataclasses.replace(QUICK, low=0.2, high=0.6)
    one, other = AutoStrength(bounds), AutoStrength(bounds)
    for number, step in enumerate(steps):
        if number == len(steps) // 2:
            state = json.loads(json.dumps(other.state_dict()))
            other = AutoStrength(bounds)
            other.load_state_dict(state)
        assert one.see(*step) == other.see(*step)
        assert 0.2 <= one.value <= 0.6


def drive(auto, steps, curvature=lambda t: 0.5, norm=lambda t: 1.0, loss=lambda t: 3.0):
    return [auto.see(curvature(t), norm(t), loss(t)) for t in range(steps)]


def test_trouble_raises_it_and_calm_lowers_it():
    calm = drive(AutoStrength(), 300)
    assert calm[63] == 0.3
    assert calm[-1] < 0.1
    assert all(b <= a for a, b in itertools.pairwise(calm))
    auto = AutoStrength()
    drive(auto, 100)
    before = auto.value
    troubled = drive(auto, 40, curvature=lambda t: 0.5 * 1.02**t, loss=lambda t: 3.0 * 1.01**t)
    assert troubled[-1] > before + 0.2


def test_each_sign_alone():
    """Curvature that rises fast, a loss that climbs, norms that spike: each alone is evidence in full."""
    signs = {"curvature": lambda t: 0.5 * 1.05**t, "loss": lambda t: 3.0 * 1.05**t, "norm": lambda t: 1.0 if t % 4 else 9.0}
    for name, sign in signs.items():
        auto = AutoStrength(dataclasses.replace(AutoSettings(), raise_at=0.6))
        drive(auto, 100)
        before = auto.value
        assert max(drive(auto, 40, **{name: sign})) > before, name


def test_between_the_two_levels_it_stays():
    """Hysteresis: evidence between ``lower_at`` and ``raise_at`` moves nothing, and no two changes come within ``wait`` steps."""
    auto = AutoStrength(AutoSettings(climb=1.0, lower_at=1e-6, raise_at=1.0))
    values = drive(auto, 200, loss=lambda t: 3.0 * 1.002**t)
    assert set(values) == {0.3}
    values = drive(AutoStrength(), 200)
    moves = [t for t in range(1, 200) if values[t] != values[t - 1]]
    assert min(b - a for a, b in itertools.pairwise(moves)) >= 8


def test_a_step_that_is_not_finite_is_a_spike_and_enters_no_average():
    auto = AutoStrength(QUICK)
    drive(auto, 20)
    averages = dict(auto.averages)
    auto.see(float("nan"), float("inf"), float("nan"))
    assert auto.spike == 1.0
    assert auto.averages == averages


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("start", 1.5),
        ("low", -0.1),
        ("start", 0.01),
        ("slow", 8),
        ("wait", 0),
        ("rise", 0),
        ("spike", 1),
        ("lower_at", 1.0),
        ("up", float("nan")),
        ("start", True),
        ("rise", "fast"),
        ("spike", None),
    ],
)
def test_bad_settings_are_named(field, value):
    low = 0.1 if field == "start" else 0.0
    with pytest.raises(lw.InputError, match=rf"auto\.{field}: got"):
        AutoStrength(dataclasses.replace(AutoSettings(low=low), **{field: value}))
