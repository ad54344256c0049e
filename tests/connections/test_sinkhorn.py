"""The fast Sinkhorn against the reference: values, the derivative of the iteration that was run, and safety."""

from __future__ import annotations

import pytest
import torch
from cases import error
from hypothesis import given, settings
from hypothesis import strategies as st

from laneway.connections import ops, reference
from laneway.connections.kernels import sinkhorn as kernel

SEED = st.integers(0, 2**31 - 1)


def both(logits, n, iterations, eps):
    g = torch.randn(len(logits), n, n, dtype=torch.float64)
    fast, slow = logits.clone().requires_grad_(), logits.double().requires_grad_()
    h = ops.sinkhorn(fast, n, iterations, eps)
    h.backward(g.to(h))
    want = reference.sinkhorn(slow.view(-1, n, n), iterations, eps)
    want.backward(g)
    return h.detach(), fast.grad, want.detach(), slow.grad


@settings(deadline=None)
@given(SEED, st.integers(1, 8), st.sampled_from([1, 2, 3, 20]), st.floats(0.05, 8.0), st.sampled_from([0.0, 1e-6]))
def test_equals_the_reference(seed, n, iterations, spread, eps):
    torch.manual_seed(seed)
    h, grad, want, want_grad = both(torch.randn(33, n * n) * spread, n, iterations, eps)
    assert error(h, want) < 1e-5
    assert error(grad, want_grad) < 2e-4  # an ill-conditioned iteration: fp32 rounding is amplified by up to the number of steps


@settings(deadline=None, max_examples=30)
@given(SEED, st.integers(1, 6), st.sampled_from([1, 3, 20]), st.floats(0.05, 12.0), st.sampled_from([0.0, 1e-6]))
def test_in_float64_it_is_the_reference_to_rounding(seed, n, iterations, spread, eps):
    torch.manual_seed(seed)
    h, grad, want, want_grad = both(torch.randn(9, n * n, dtype=torch.float64) * spread, n, iterations, eps)
    assert error(h, want) < 1e-11
    assert error(grad, want_grad) < 1e-9


@pytest.mark.parametrize("iterations", [1, 3, 20])
@pytest.mark.parametrize("eps", [0.0, 1e-3])
def test_gradcheck(iterations, eps):
    torch.manual_seed(0)
    logits = (2 * torch.randn(3, 16, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(lambda t: ops.sinkhorn(t, 4, iterations, eps), (logits,))


@pytest.mark.parametrize("n", [2, 4, 8, 128])
@pytest.mark.parametrize("spread", [50.0, 1e3, 1e4])
@pytest.mark.parametrize("iterations", [20, 200])
def test_huge_logits(n, spread, iterations):
    torch.manual_seed(0)
    logits = torch.randn(500 if n <= 8 else 5, n * n) * spread
    logits[0] = spread  # all equal
    logits[1] = torch.arange(n * n) * spread  # every input prefers the same output
    logits.requires_grad_()
    h = ops.sinkhorn(logits, n, iterations, 0.0)
    h.square().sum().backward()
    assert torch.isfinite(h).all()
    assert torch.isfinite(logits.grad).all()
    assert (h.sum(-1) - 1).abs().max() < 1e-5


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_gradient_scale_passes_through(scale):
    torch.manual_seed(0)
    logits = torch.randn(64, 16)
    g = torch.randn(64, 4, 4)
    unit = kernel.backward(g, logits, 4, 20, 0.0)
    torch.testing.assert_close(kernel.backward(g * scale, logits, 4, 20, 0.0), unit * scale, rtol=1e-4, atol=1e-7 * scale)


@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 31, 33, 127])
def test_any_number_of_tokens_in_any_chunks(tokens, monkeypatch):
    torch.manual_seed(0)
    logits, g = torch.randn(tokens, 9), torch.randn(tokens, 3, 3)
    whole = kernel.forward(logits, 3, 20, 0.0), kernel.backward(g, logits, 3, 20, 0.0)
    monkeypatch.setattr(kernel, "CHUNK", 32)
    torch.testing.assert_close(kernel.forward(logits, 3, 20, 0.0), whole[0])
    torch.testing.assert_close(kernel.backward(g, logits, 3, 20, 0.0), whole[1])


def test_strided_logits():
    torch.manual_seed(0)
    wide = torch.randn(40, 24)
    part = wide[:, 8:]
    torch.testing.assert_close(kernel.forward(part, 4, 20, 0.0), kernel.forward(part.contiguous(), 4, 20, 0.0), rtol=0, atol=0)


def test_a_poisoned_token_touches_no_other():
    torch.manual_seed(0)
    logits, g = torch.randn(9, 16), torch.randn(9, 4, 4)
    clean = kernel.forward(logits, 4, 20, 0.0), kernel.backward(g, logits, 4, 20, 0.0)
    logits[4] = float("nan")
    others = torch.arange(9) != 4
    assert torch.equal(kernel.forward(logits, 4, 20, 0.0)[others], clean[0][others])
    assert torch.equal(kernel.backward(g, logits, 4, 20, 0.0)[others], clean[1][others])
