"""The oracle itself: against hand-computed cases, and against the definition written another way."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from laneway.connections import reference

SEED = st.integers(0, 2**31 - 1)


def test_file_stays_readable():
    assert len(inspect.getsource(reference).splitlines()) <= 100


def test_one_stream_is_worked_out_by_hand():
    x = torch.tensor([[[3.0, 4.0]]], dtype=torch.float64)
    fn = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    base, scale = torch.tensor([0.1, 0.2, 0.3]).double(), torch.tensor([2.0, 3.0, 4.0]).double()
    rms = math.sqrt(12.5)
    pre = 1 / (1 + math.exp(-(2 * 3 / rms + 0.1)))
    post = 2 / (1 + math.exp(-(3 * 4 / rms + 0.2)))
    y = reference.connection(x, lambda h: h + 1, fn, base, scale)
    want = torch.tensor([[[3 + post * (pre * 3 + 1), 4 + post * (pre * 4 + 1)]]], dtype=torch.float64)
    torch.testing.assert_close(y, want)


@given(SEED, st.integers(1, 6), st.floats(0.1, 8.0))
def test_sinkhorn_is_the_papers_iteration(seed, n, spread):
    """M⁰ = exp(H̃), then columns to one, then rows to one: written with exp and sums, in H_res's own orientation."""
    torch.manual_seed(seed)
    logits = torch.randn(7, n, n, dtype=torch.float64) * spread
    m = logits.transpose(-1, -2).exp()
    for _ in range(20):
        m = m / m.sum(-2, keepdim=True)
        m = m / m.sum(-1, keepdim=True)
    torch.testing.assert_close(reference.sinkhorn(logits), m)


@given(SEED, st.integers(1, 6))
def test_rows_are_exact_and_columns_come_close(seed, n):
    torch.manual_seed(seed)
    h = reference.sinkhorn(torch.randn(50, n, n, dtype=torch.float64))
    assert (h.sum(-1) - 1).abs().max() < 1e-12
    assert (h.sum(-2) - 1).abs().max() < 1e-2


def test_orientation_is_stated_by_an_asymmetric_matrix():
    """Logits are laid out [in, out]: a large logit at [0, 1] sends stream 0 to stream 1."""
    logits = torch.zeros(2, 2, dtype=torch.float64)
    logits[0, 1] = logits[1, 0] = 40.0
    logits[0, 1] += 1
    h = reference.sinkhorn(logits)
    assert h[1, 0] > 0.99
    x = torch.tensor([[1.0], [2.0]], dtype=torch.float64)
    mixed = reference.post_mix(x, torch.zeros(1).double(), torch.zeros(2).double(), h)
    torch.testing.assert_close(mixed, torch.tensor([[2.0], [1.0]]).double(), atol=1e-9, rtol=0)


@pytest.mark.parametrize("spread", [10.0, 1e4])
def test_huge_logits_stay_finite(spread):
    torch.manual_seed(0)
    logits = (torch.randn(64, 4, 4, dtype=torch.float64) * spread).requires_grad_()
    h = reference.sinkhorn(logits)
    h.square().sum().backward()
    assert torch.isfinite(h).all()
    assert torch.isfinite(logits.grad).all()
    assert (h.sum(-1) - 1).abs().max() < 1e-9


def test_composite_gain_of_known_matrices():
    double, swap = 2 * torch.eye(2).double(), torch.tensor([[0.0, 1.0], [1.0, 0.0]]).double()
    uneven = torch.tensor([[1.0, 1.0], [0.0, 0.5]]).double()
    forward, backward = reference.composite_gain([double, swap])
    assert forward == backward == 2.0
    forward, backward = reference.composite_gain([uneven, double])
    assert (forward.item(), backward.item()) == (4.0, 3.0)
