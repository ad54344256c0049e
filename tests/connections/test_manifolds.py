"""Every manifold keeps its promise at any logits, starts near the identity, and has a right derivative."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import laneway as lw
from laneway.connections import manifolds

DOUBLY_STOCHASTIC = ("birkhoff", "kronecker", "identity")


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**31 - 1), st.sampled_from(DOUBLY_STOCHASTIC), st.integers(1, 6), st.sampled_from([0.0, 1.0, 30.0, 1e4]))
def test_exactly_doubly_stochastic(seed, name, n, spread):
    torch.manual_seed(seed)
    manifold = manifolds.build(name, n)
    h = manifold(torch.randn(20, manifold.logits) * spread)
    assert (h >= 0).all()
    assert (h.sum(-1) - 1).abs().max() < 1e-5
    assert (h.sum(-2) - 1).abs().max() < 1e-5


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**31 - 1), st.integers(1, 8), st.sampled_from([0.0, 1.0, 30.0, 1e4]))
def test_cayley_is_orthogonal(seed, n, spread):
    torch.manual_seed(seed)
    manifold = manifolds.build("orthogonal", n)
    h = manifold((torch.randn(20, manifold.logits) * spread).double())
    torch.testing.assert_close(h @ h.transpose(-1, -2), torch.eye(n).double().expand_as(h), atol=1e-9, rtol=0)


@pytest.mark.parametrize("name", manifolds.MANIFOLDS)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 6])
def test_start_is_close_to_the_identity(name, n):
    manifold = manifolds.build(name, n)
    h = manifold(manifold.start.expand(3, -1))
    leak = 6**6 * 720 * torch.tensor(-manifolds.START).exp() if name in ("birkhoff", "kronecker") else n * 4e-4
    assert (h - torch.eye(n)).abs().max() <= min(leak, 0.3 if n > 4 else 0.03)


@pytest.mark.parametrize("name", manifolds.MANIFOLDS)
def test_gradcheck(name):
    manifold = manifolds.build(name, 4)
    logits = torch.randn(3, manifold.logits, dtype=torch.float64, requires_grad=True)
    if manifold.logits:
        assert torch.autograd.gradcheck(manifold, (logits,))


def test_sizes_of_the_projections():
    sizes = {name: manifolds.build(name, 4).logits for name in manifolds.MANIFOLDS}
    assert sizes == {"sinkhorn": 16, "birkhoff": 24, "kronecker": 4, "orthogonal": 6, "identity": 0, "none": 16}
    assert manifolds.build("kronecker", 12).logits == 2 + 2 + 6


def test_permutations_are_all_there_and_the_identity_is_first():
    matrices = manifolds.build("birkhoff", 4).permutations.view(24, 4, 4)
    assert torch.equal(matrices[0], torch.eye(4))
    assert len({tuple(m.flatten().tolist()) for m in matrices}) == 24
    assert torch.equal(matrices.sum(-1), torch.ones(24, 4))
    assert torch.equal(matrices.sum(-2), torch.ones(24, 4))


@pytest.mark.parametrize(("n", "want"), [(1, [1]), (2, [2]), (12, [2, 2, 3]), (7, [7]), (30, [2, 3, 5])])
def test_factors(n, want):
    assert manifolds.factors(n) == want


@pytest.mark.parametrize("name", manifolds.MANIFOLDS)
def test_no_manifold_adds_to_the_state_dict(name):
    assert sorted(lw.HyperConnection(8, 4, name).state_dict()) == ["base", "fn", "scale"]
