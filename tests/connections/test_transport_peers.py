"""Distances, barycentres and the partial transport of magnitudes beside those of POT, which has no quantile functions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laneway.connections import transport
from laneway.connections.transport import LEVELS, WEIGHTS

pytestmark = pytest.mark.peers
ot = pytest.importorskip("ot", reason="needs the `peers` extra: POT")

SEEDS = st.integers(0, 10**6)
BIN = transport.OCTAVES * math.log(2)


def quantile_functions(seed: int, count: int) -> np.ndarray:
    return np.sort(np.random.default_rng(seed).normal(0, 3, (count, len(LEVELS))), 1)


def logarithms(seed: int, count: int, centre: float, spread: float) -> np.ndarray:
    return np.random.default_rng(seed).normal(centre, spread, count)


def quantiles_of(logs: np.ndarray) -> np.ndarray:
    values = torch.tensor(np.exp(logs), dtype=torch.float32)
    return transport.quantiles(transport.histograms(values, torch.zeros(len(values), dtype=torch.int64), 1).double().numpy())[0]


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return ot.wasserstein_1d(a, b, p=2) ** 0.5


@given(seed=SEEDS)
@settings(max_examples=15, deadline=None)
def test_the_distance_is_that_of_the_levels_with_their_weights(seed):
    a, b = quantile_functions(seed, 2)
    assert transport.distance(a, b).item() == pytest.approx(ot.wasserstein_1d(a, b, WEIGHTS, WEIGHTS, p=2) ** 0.5)
    assert transport.distance(a, b).item() == pytest.approx(ot.emd2_1d(a, b, WEIGHTS, WEIGHTS) ** 0.5)


@given(seed=SEEDS, shift=st.floats(-4, 4), spread=st.floats(0.3, 3))
@settings(max_examples=15, deadline=None)
def test_the_distance_of_samples_is_met_within_a_bin(seed, shift, spread):
    a, b = logarithms(seed, 3000, -5, 1.5), logarithms(seed + 1, 2000, -5 + shift, spread)
    assert transport.distance(quantiles_of(a), quantiles_of(b)).item() == pytest.approx(distance(a, b), abs=BIN)


@given(seed=SEEDS, count=st.integers(3, 7), data=st.data())
@settings(max_examples=8, deadline=None)
def test_a_leave_one_out_barycentre_is_the_one_that_is_found_by_iteration(seed, count, data):
    """POT moves free points until their summed squared distances to the measures fall no more."""
    q = quantile_functions(seed, count)
    path = data.draw(st.integers(0, count - 1))
    outlier = data.draw(st.integers(0, count - 1))
    inside = np.arange(count) != outlier
    others = [q[j][:, None] for j in range(count) if j not in (path, outlier)]
    begin = np.random.default_rng(seed).normal(size=(len(LEVELS), 1)) * 5
    found = ot.lp.free_support_barycenter(others, [WEIGHTS] * len(others), np.sort(begin, 0), b=WEIGHTS, numItermax=20)
    assert transport.barycentre(q, inside)[path] == pytest.approx(found[:, 0], abs=1e-9)


@given(seed=SEEDS, lower=st.floats(0.5, 8), spread=st.floats(0.4, 2.5), strength=st.floats(0.05, 1))
@settings(max_examples=10, deadline=None)
def test_partial_transport_goes_its_part_of_the_way_of_the_optimal_plan(seed, lower, spread, strength):
    """The plan sends every value somewhere; where that is lower, it goes ``strength`` of the way, and elsewhere it stays."""
    count = 1500
    before, target = logarithms(seed, count, -3, 1.5), logarithms(seed + 1, count, -3 - lower, spread)
    plan = ot.emd_1d(before, target, metric="sqeuclidean")
    sent = count * plan @ target
    expected = before - strength * (before - sent).clip(min=0)
    gradient = torch.tensor(np.exp(before) * np.random.default_rng(seed).choice([-1, 1], count), dtype=torch.float32)
    transport.move_down(gradient, quantiles_of(before), quantiles_of(target), strength)
    after = gradient.abs().double().log().numpy()
    assert distance(after, expected) <= BIN / 2
    inner = np.argsort(before)[count // 20 : -count // 20]
    assert np.abs(after - expected)[inner].max() <= 1.5 * BIN
    if (sent <= before).all():  # then the way is McCann's: the distance left is the part that was not gone
        assert distance(after, target) == pytest.approx((1 - strength) * distance(before, target), abs=BIN / 2)
