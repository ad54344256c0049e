"""The ops of an mHC site: derivatives of both orders, registration, compilation, sites in a row."""

from __future__ import annotations

import shutil

import pytest
import torch
from cases import branch_for, random_site

from laneway.connections import StreamChain, site_ops

needs_compiler = pytest.mark.skipif(not shutil.which("c++") and not shutil.which("g++"), reason="no C++ compiler")
OPTIONS = (1e-6, 0.0, 8.0, 3)
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def parameters(n, c, dtype=torch.float64):
    m = n * (n + 2)
    fn, base, scale = torch.randn(m, n * c, dtype=dtype) / 3, torch.randn(m, dtype=dtype), torch.rand(3, dtype=dtype) + 0.5
    return [t.requires_grad_() for t in (fn, base, scale)]


def leaf(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def pre(x, carried, *rest, options=OPTIONS):
    return site_ops.mhc_pre(x, carried, *rest, *options)[:2]


def site(x, carried, fn, base, scale, options=OPTIONS):
    """A whole site around tanh: one function of its inputs, carry and all."""
    h, maps, carry, *_ = site_ops.mhc_pre(x, carried, fn, base, scale, *options)
    return site_ops.mhc_post(x, carry, torch.tanh(h), maps)


def two_sites(x, carried, fn, base, scale, fn2, base2, scale2, options=OPTIONS):
    n = x.shape[-2]
    h, maps, carry, *_ = site_ops.mhc_pre(x, carried, fn, base, scale, *options)
    pre_map = None if carried is None else maps[:, :n].contiguous()
    y, h, next_maps, carry, *_ = site_ops.mhc_cross(x, carry, torch.tanh(h), maps, pre_map, fn2, base2, scale2, *options)
    return y, site_ops.mhc_post(y, carry, torch.tanh(h), next_maps)


@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize(("options", "n", "c"), [(OPTIONS, 3, 2), ((0.0, 1e-2, 0.0, 2), 2, 3), ((1e-6, 0.0, 0.0, 12), 2, 2)])
def test_first_derivatives(carried, options, n, c):
    x, weights = leaf(2, n, c), leaf(2, n) if carried else None
    first, second = parameters(n, c), parameters(n, c)
    assert torch.autograd.gradcheck(lambda *a: pre(*a, options=options), (x, weights, *first))
    assert torch.autograd.gradcheck(lambda *a: two_sites(*a, options=options), (x, weights, *first, *second))


@pytest.mark.parametrize("carried", [False, True])
def test_second_derivatives(carried):
    x, weights = leaf(2, 2, 2), leaf(2, 2) if carried else None
    assert torch.autograd.gradgradcheck(site, (x, weights, *parameters(2, 2)))
    # Of two sites: random projections of the derivatives, not each element.
    assert torch.autograd.gradgradcheck(two_sites, (x, weights, *parameters(2, 2), *parameters(2, 2)), fast_mode=True)


def test_a_gradient_penalty_in_fp32_is_that_of_float64():
    """Second derivatives of the compiled kernels go through the reference."""
    layer, gy = random_site(12, 4), torch.randn(5, 4, 12)

    def penalty(dtype):
        x = x_given.to(dtype).requires_grad_()
        h, merge = layer.to(dtype)(x)
        (g,) = torch.autograd.grad(merge(torch.tanh(h)), x, gy.to(dtype), create_graph=True)
        return torch.autograd.grad(g.square().sum(), (x, layer.fn, layer.base))

    x_given = torch.randn(5, 4, 12)
    got = penalty(torch.float32)
    for a, b in zip(got, penalty(torch.float64), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-4, atol=2e-5 * b.abs().max().item())


def test_streams_may_be_used_elsewhere_too():
    """The streams between two sites feed another loss as well: carry takes nothing from autograd's own sums."""
    first, second, w = (
        random_site(6, 3, dtype=torch.float64),
        random_site(6, 3, dtype=torch.float64),
        torch.randn(4, 3, 6).double(),
    )
    x = torch.randn(4, 3, 6).double()

    def loss(x, crossing):
        h, merge = first(x)
        if crossing:
            h, merge = merge.into(second, torch.tanh(h))
            y = merge.x
        else:
            y = merge(torch.tanh(h))
            h, merge = second(y)
        return (merge(torch.sin(h)) * w).sum() + (y.square() * w).sum() + merge.res.square().sum()

    grads = []
    for crossing in (False, True):
        leaf_x = x.clone().requires_grad_()
        grads.append(torch.autograd.grad(loss(leaf_x, crossing), [leaf_x, *first.parameters(), *second.parameters()]))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_h_alone_and_maps_alone_have_gradients():
    layer, x = random_site(6, 3, dtype=torch.float64), torch.randn(4, 3, 6).double().requires_grad_()
    h, _ = layer(x)
    assert torch.autograd.grad(h.sum(), x)[0].any()
    _, merge = layer(x)
    assert torch.autograd.grad(merge.res.square().sum(), x)[0].any()


def test_registration_is_sound():
    """torch's own checker: aliasing, fake kernels, autograd and AOT dispatch with dynamic shapes."""
    x, f = leaf(5, 3, 8, dtype=torch.float32), leaf(5, 8, dtype=torch.float32)
    own = parameters(3, 8, torch.float32)
    maps, carry = leaf(5, 15, dtype=torch.float32), x.detach().clone()
    for carried in (None, leaf(5, 3, dtype=torch.float32)):
        torch.library.opcheck(site_ops.mhc_pre, (x, carried, *own, *OPTIONS), test_utils=CHECKS)
        torch.library.opcheck(site_ops.mhc_cross, (x, carry, f, maps, carried, *own, *OPTIONS), test_utils=CHECKS)
    torch.library.opcheck(site_ops.mhc_post, (x, carry, f, maps), test_utils=CHECKS)


@needs_compiler
@pytest.mark.compiler
@pytest.mark.parametrize("single_pass", [False, True])
def test_a_chain_compiles_without_a_graph_break(single_pass):
    """fullgraph, forward and backward, two token counts, one compilation."""
    sites = [random_site(16, 4, single_pass=single_pass) for _ in range(3)]
    branch = branch_for(16)

    def step(x):
        chain = StreamChain(x)
        for one in sites:
            chain.leave(branch(chain.enter(one)))
        return chain.streams()

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for tokens in (9, 14):
        x, gy = torch.randn(tokens, 4, 16), torch.randn(tokens, 4, 16)
        results = []
        for function in (step, compiled):
            leaf_x = x.clone().requires_grad_()
            y = function(leaf_x)
            results.append([y, *torch.autograd.grad(y, [leaf_x, *(p for s in sites for p in s.parameters())], gy)])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
