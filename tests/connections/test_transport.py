"""Distributions of magnitudes: counts, quantiles, distances against numpy and scipy; barycentres and transport by their laws.

test_transport_peers.py has the same beside POT.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laneway.connections import transport
from laneway.connections.transport import BINS, LEVELS, WEIGHTS

BIN = transport.OCTAVES * math.log(2)


def magnitudes(seed: int, count: int = 4000, centre: float = -5.0, spread: float = 1.5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(count, generator=generator) * spread + centre).exp()


def counted(values: torch.Tensor) -> torch.Tensor:
    return transport.histograms(values, torch.zeros(len(values), dtype=torch.int64), 1)[0]


def quantiles_of(values: torch.Tensor) -> np.ndarray:
    return transport.quantiles(counted(values)[None].double().numpy())[0]


def quantile_functions(seed: int, count: int) -> np.ndarray:
    return np.sort(np.random.default_rng(seed).normal(0, 3, (count, len(LEVELS))), 1)


@given(seed=st.integers(0, 10**6), centre=st.floats(-30, 10), spread=st.floats(0.1, 4))
@settings(max_examples=30, deadline=None)
def test_quantiles_are_those_of_the_sample_within_a_bin(seed, centre, spread):
    values = magnitudes(seed, centre=centre, spread=spread)
    found = quantiles_of(values)
    wanted = np.quantile(values.double().log().numpy(), LEVELS, method="inverted_cdf")
    assert np.abs(found - wanted).max() <= BIN
    assert (np.diff(found) >= 0).all()


def test_levels_stand_for_everything():
    assert WEIGHTS.sum() == 1
    assert (WEIGHTS.cumsum() - WEIGHTS / 2 == LEVELS).all()


def test_counts_of_shards_add_up_to_those_of_the_whole():
    values, owners = magnitudes(1), torch.arange(4000) % 3
    whole = transport.histograms(values, owners, 3)
    parts = [transport.histograms(values[a:b], owners[a:b], 3) for a, b in ((0, 17), (17, 2500), (2500, 4000))]
    assert torch.equal(sum(parts), whole)
    assert torch.equal(whole[1], counted(values[owners == 1]))


def test_signs_do_not_matter_and_what_has_no_logarithm_is_left_out():
    values = magnitudes(2)
    odd = torch.tensor([0.0, -0.0, math.nan, math.inf, -math.inf])
    signs = torch.where(torch.arange(4000) % 2 == 0, 1.0, -1.0)
    assert torch.equal(counted(torch.cat([values * signs, odd])), counted(values))
    assert np.isnan(quantiles_of(odd)).all()


def test_what_is_beyond_the_bins_is_in_the_last_ones():
    found = counted(torch.tensor([1e-38, 1e38]))
    assert found[0] == found[BINS - 1] == 1


@given(seed=st.integers(0, 10**6))
@settings(max_examples=15, deadline=None)
def test_the_distance_of_order_one_is_scipys(seed):
    stats = pytest.importorskip("scipy.stats", reason="the extra `solver` is not installed")
    a, b = quantile_functions(seed, 2)
    wanted = stats.wasserstein_distance(a, b, WEIGHTS, WEIGHTS)
    assert transport.distance(a, b, 1).item() == pytest.approx(wanted, rel=1e-9)
    x, y = magnitudes(seed), magnitudes(seed + 1, centre=-4.0, spread=1.0)
    sampled = stats.wasserstein_distance(x.double().log().numpy(), y.double().log().numpy())
    counts = transport.distance(quantiles_of(x), quantiles_of(y), 1)
    assert counts.item() == pytest.approx(sampled, abs=BIN)


@given(seed=st.integers(0, 10**6))
@settings(max_examples=5, deadline=None)
def test_the_distance_of_order_two_is_the_least_cost_of_an_assignment(seed):
    """Levels stand for multiples of 1/256: so many equal points each, and the best way to send one's points to the other's."""
    optimize = pytest.importorskip("scipy.optimize", reason="the extra `solver` is not installed")
    a, b = quantile_functions(seed, 2)
    points = (256 * WEIGHTS).round().astype(int)
    cost = np.square(np.repeat(a, points)[:, None] - np.repeat(b, points))
    wanted = cost[optimize.linear_sum_assignment(cost)].mean() ** 0.5
    assert transport.distance(a, b).item() == pytest.approx(wanted, rel=1e-9)


def test_a_factor_is_a_shift_and_an_excess_counts_one_side():
    q = quantile_functions(0, 1)[0]
    assert transport.distance(q + 2.5, q).item() == pytest.approx(2.5)
    assert transport.excess(q + 2.5, q).item() == pytest.approx(2.5)
    assert transport.excess(q - 2.5, q).item() == 0


@given(seed=st.integers(0, 10**6), count=st.integers(3, 9))
@settings(max_examples=15, deadline=None)
def test_a_barycentre_has_the_least_sum_of_squared_distances_to_the_others(seed, count):
    q = quantile_functions(seed, count)
    inside = np.ones(count, np.bool_)
    inside[0] = False
    centres = transport.barycentre(q, inside)
    for path in range(count):
        others = [j for j in range(1, count) if j != path]

        def cost(candidate: np.ndarray, others: list[int] = others) -> float:
            return sum(transport.distance(candidate, q[j]) ** 2 for j in others)

        np.testing.assert_allclose(centres[path], q[others].mean(0))
        assert cost(centres[path]) <= cost(centres[path] + 0.1 * np.sort(np.random.default_rng(seed).normal(size=len(LEVELS))))


def test_there_is_no_barycentre_of_nothing():
    q = quantile_functions(0, 2)
    found = transport.barycentre(q, np.array([True, False]))
    assert np.isnan(found[0]).all()
    assert (found[1] == q[0]).all()


@given(seed=st.integers(0, 10**6), strength=st.floats(0.05, 1), chunk=st.sampled_from([7, 1000, 1 << 20]))
@settings(max_examples=30, deadline=None)
def test_transport_keeps_signs_and_order_and_lets_nothing_grow(seed, strength, chunk):
    signs = torch.randint(0, 2, (3000,), generator=torch.Generator().manual_seed(seed)) * 2 - 1
    before = magnitudes(seed, 3000) * signs
    before[5] = 0.0
    source = quantiles_of(before)
    target = np.sort(source + np.random.default_rng(seed).normal(0, 3, len(LEVELS)))
    after = before.clone()
    transport.move_down(after, source, target, strength, chunk)
    assert (after.abs() <= before.abs()).all()
    assert torch.equal(after.sign(), before.sign())
    order = before.abs().argsort()
    assert (after.abs()[order].diff() >= -1e-6 * after.abs()[order][1:]).all()
    lower = source <= target
    if lower.all():
        assert torch.equal(after, before)


def test_all_of_the_way_is_the_target_and_no_excess_is_no_change():
    before = magnitudes(3, 20_000)
    source = quantiles_of(before)
    after = before.clone()
    transport.move_down(after, source, source - 4, 1.0)
    assert transport.distance(quantiles_of(after), source - 4) < BIN / 4
    same = before.clone()
    transport.move_down(same, source, source + 1e-3, 1.0)
    assert torch.equal(same, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_transport_of_other_dtypes_and_layouts(dtype):
    before = (magnitudes(4, 4096, centre=0.0).view(64, 64) * 8).to(dtype)
    source = quantiles_of(before.flatten())
    contiguous, across = before.clone(), before.t().contiguous().t()
    assert not across.is_contiguous()
    transport.move_down(contiguous, source, source - 2, 1.0)
    transport.move_down(across, source, source - 2, 1.0)
    assert torch.equal(contiguous, across)
    torch.testing.assert_close(contiguous.double(), before.double() * math.exp(-2), rtol=1e-2, atol=0)


def test_interpolation_is_numpys():
    knots, values = torch.randn(9).sort().values, torch.randn(9)
    x = torch.randn(200) * 3
    torch.testing.assert_close(
        transport.interpolate(x, knots, values).double(),
        torch.tensor(np.interp(x.numpy(), knots.numpy(), values.numpy())),
        rtol=1e-5,
        atol=1e-6,
        check_dtype=False,
    )
