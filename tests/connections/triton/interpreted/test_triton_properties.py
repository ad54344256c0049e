"""What holds for all inputs: missing gradients are zeros, tokens know nothing of each other, extremes stay finite."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from oracle import Case, case, error, finished_maps, maps

from laneway.connections.kernels.triton import LARGEST, backend
from laneway.core import InputError

SHORT = {"iterations": 2}


def forward(c: Case, old):
    """y, h, maps, z and r of a boundary between two sites."""
    return backend.cross(c.x, c.f, old, c.carried, *c.parameters, *c.forward_options)


def backward(c: Case, old, results, gnext=None, gy=None, gh=None, gmaps=None):
    """All gradients at that boundary: of tokens first, and sums last."""
    y, _, new, z, r = results
    at_next = (y, c.carried, *c.parameters, new, z, r, *c.backward_options)
    g, gf, gold, *sums, gcarried = backend.cross_backward(gnext, gy, gh, gmaps, c.x, c.f, old, *at_next)
    return [g, gf, gold, *([] if gcarried is None else [gcarried])], sums


def both(c: Case, old, *grads):
    """All results, forward and backward, of tokens first and sums last."""
    results = forward(c, old)
    tokens, sums = backward(c, old, results, *grads)
    return [*results, *tokens], sums


def together(results):
    """Of tokens and sums one list."""
    tokens, sums = results
    return tokens + sums


def given(c: Case):
    """Fresh gradients: of the next post's streams, of y, of h and of the maps."""
    m = c.fn.shape[0]
    return torch.randn_like(c.x), torch.randn_like(c.x), torch.randn_like(c.f), torch.randn(c.x.shape[0], m)


@pytest.mark.parametrize("carried", [False, True])
def test_a_missing_gradient_is_a_zero(carried):
    c, old = case(3, 1, 40, carried=carried, **SHORT), finished_maps(3, 1)
    results, grads = forward(c, old), given(c)
    for missing in range(4):
        some = [None if k == missing else g for k, g in enumerate(grads)]
        zero = [torch.zeros_like(g) if k == missing else g for k, g in enumerate(grads)]
        got, want = (together(backward(c, old, results, *chosen)) for chosen in (some, zero))
        assert all(error(a, b.double()) <= 1e-6 for a, b in zip(got, want, strict=True))
    assert not any(t.any() for t in together(backward(c, old, results)))


def test_a_gradient_from_elsewhere_is_added():
    c, old = case(5, 2, 40, **SHORT), finished_maps(5, 2)
    results, (gnext, gy, gh, gmaps) = forward(c, old), given(c)
    (without, _, _), _ = backward(c, old, results, gnext, None, gh, gmaps)
    (with_gy, gf, _), _ = backward(c, old, results, gnext, gy, gh, gmaps)
    assert error(with_gy, (without + gy).double()) <= 1e-6
    assert error(gf, torch.einsum("tn,tnc->tc", old[:, 2:4], with_gy).double()) <= 1e-6


@pytest.mark.parametrize(("dtype", "carried"), [(torch.float32, True), (torch.bfloat16, False)])
def test_a_token_is_the_same_in_any_batch(dtype, carried):
    """Tiles are of up to 64 tokens, and 67 are two of the largest."""
    c, old = case(67, 1 if carried else 2, 40, dtype, carried=carried, **SHORT), finished_maps(67, 1 if carried else 2)
    grads = given(c)
    whole, _ = both(c, old, *grads)
    for part in (slice(0, 1), slice(60, 67)):
        some, _ = both(c.token(part), old[part], *(g[part] for g in grads))
        assert all(torch.equal(a[part], b) for a, b in zip(whole, some, strict=True)), part


@pytest.fixture(scope="module")
def clean():
    """A boundary of 35 tokens: the case, maps, gradients and all results of tokens."""
    c, old = case(35, 2, 40, torch.bfloat16, carried=True, **SHORT), finished_maps(35, 2)
    grads = given(c)
    return c, old, grads, both(c, old, *grads)[0]


@pytest.mark.parametrize("where", ["x", "f", "gnext", "gh", "gmaps"])
def test_nan_in_a_token_stays_there(clean, where):
    c, old, (gnext, gy, gh, gmaps), want = clean
    named = {"x": c.x, "f": c.f, "gnext": gnext, "gh": gh, "gmaps": gmaps}
    named[where] = named[where].clone()
    named[where][33] = torch.nan
    c = replace(c, x=named["x"], f=named["f"])
    grads = named["gnext"], gy, named["gh"], named["gmaps"]
    # Gradients are no input of the forward pass.
    got = both(c, old, *grads)[0] if where in "xf" else [*want[:5], *backward(c, old, want[:5], *grads)[0]]
    others = torch.arange(35) != 33
    assert any(t[33].isnan().any() for t in got)
    assert all(torch.equal(a[others], b[others]) for a, b in zip(want, got, strict=True))


def test_runs_are_the_same_bit_for_bit():
    c, old = case(35, 2, 40, torch.bfloat16, **SHORT), finished_maps(35, 2)
    grads = given(c)
    first, second = (together(both(c, old, *grads)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("carried", [False, True])
def test_no_tokens(carried):
    c, old = case(0, 4, 40, carried=carried), finished_maps(0, 4)
    tokens, sums = both(c, old, *given(c))
    assert [t.shape[0] for t in tokens] == [0] * len(tokens)
    assert [t.shape for t in sums] == [c.fn.shape, c.base.shape, c.scale.shape]
    assert not any(t.any() for t in sums)
    assert [t.shape[0] for t in backend.pre(c.x, c.carried, *c.parameters, *c.forward_options)] == [0] * 4
    assert [t.shape[0] for t in backend.post_backward(c.x, c.x, c.f, old)] == [0, 0]


@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_large_logits_are_finite_and_right(eps):
    """Logits of standard deviation 30, without a cap: 13 iterations leave the columns far off, and cross a segment."""
    c = case(16, 3, 33, spread=30.0, cap=0.0, eps=eps, iterations=13)
    h, got, z, r = backend.pre(c.x, None, *c.parameters, *c.forward_options)
    w = c.wide()
    want, *_ = maps(w.x, w)
    assert error(got, want) <= 1e-4
    gmaps = torch.randn_like(got)
    gx, _, gbase, _, _ = backend.pre_backward(None, None, gmaps, c.x, None, *c.parameters, got, z, r, *c.backward_options)
    true_gx, true_gbase = torch.autograd.grad(want, (w.x, w.base), gmaps.double())
    assert h.isfinite().all()
    assert error(gx, true_gx) <= 1e-3
    assert error(gbase, true_gbase) <= 1e-3


def test_huge_streams_are_finite():
    c = case(3, 4, 40, torch.bfloat16, **SHORT)
    c.x.mul_(1e4)
    tokens, sums = both(c, finished_maps(3, 4), *given(c))
    assert all(t.isfinite().all() for t in tokens + sums)


def test_the_carried_weights_may_be_columns_of_the_maps():
    c, old = case(5, 3, 40, **SHORT), finished_maps(5, 3)
    view = backend.pre(c.x, old[:, :3], *c.parameters, *c.forward_options)
    copy = backend.pre(c.x, old[:, :3].clone(), *c.parameters, *c.forward_options)
    assert all(torch.equal(a, b) for a, b in zip(view, copy, strict=True))


def test_what_has_no_kernel_is_refused():
    c = case(2, 4, 16)
    with pytest.raises(InputError, match=r"dtype: got torch.float16; accepted: torch.float32 or torch.bfloat16"):
        backend.post(c.x.half(), c.f.half(), finished_maps(2, 4))
    with pytest.raises(InputError, match=rf"streams: got 9; accepted: 1 … {LARGEST}"):
        backend.post(torch.zeros(2, 9, 16), c.f, finished_maps(2, 9))
