"""The ops as torch.library objects: schema, fake kernels, derivatives, torch.compile, autocast, checkpointing."""

from __future__ import annotations

import shutil

import pytest
import torch
from cases import branch_for, random_site, run
from torch.utils.checkpoint import checkpoint

from laneway.connections import ops

needs_compiler = pytest.mark.skipif(not shutil.which("c++") and not shutil.which("g++"), reason="no C++ compiler")


def pre_arguments(dtype=torch.float64, per_stream=False, eps=0.0, n=3, c=5, tokens=4):
    rows = n + 2 if per_stream else n * (n + 2)
    x = torch.randn(tokens, n, c, dtype=dtype, requires_grad=True)
    wide = ops.eager.compute_dtype(dtype)
    fn = (torch.randn(rows, c if per_stream else n * c, dtype=wide) / 4).requires_grad_()
    base, scale = torch.randn(n * (n + 2), dtype=wide, requires_grad=True), torch.randn(3, dtype=wide, requires_grad=True)
    return x, fn, base, scale, per_stream, 1e-6, eps


@pytest.mark.parametrize(("per_stream", "eps"), [(False, 0.0), (False, 1e-2), (True, 0.0)])
def test_pre_mix_gradcheck(per_stream, eps):
    arguments = pre_arguments(per_stream=per_stream, eps=eps)
    assert torch.autograd.gradcheck(lambda *a: ops.pre_mix(*a)[:2], arguments)


def test_post_mix_gradcheck():
    """The gradient of the streams comes out at ``carry``, so both are given as one tensor."""
    x = torch.randn(4, 3, 5, dtype=torch.float64, requires_grad=True)
    f = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    post = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    res = torch.randn(4, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *a: ops.post_mix(x.detach(), x, *a), (x, f, post, res))


def test_whole_site_gradcheck():
    site = random_site(5, 3, dtype=torch.float64)
    x = torch.randn(4, 3, 5, dtype=torch.float64, requires_grad=True)

    def whole(x, *parameters):
        h, merge = site(x)
        return merge(torch.tanh(h))

    assert torch.autograd.gradcheck(whole, (x, *site.parameters()))


CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def test_registration_is_sound():
    """torch's own checker: aliasing, fake kernels, autograd and AOT dispatch with dynamic shapes."""
    torch.library.opcheck(ops.pre_mix, pre_arguments(torch.float32), test_utils=CHECKS)
    logits = torch.randn(5, 9, requires_grad=True)
    torch.library.opcheck(ops.sinkhorn, (logits, 3, 20, 0.0), test_utils=CHECKS)
    x, f = torch.randn(5, 3, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True)
    maps = torch.rand(5, 3, requires_grad=True), torch.rand(5, 3, 3, requires_grad=True)
    torch.library.opcheck(ops.post_mix, (x, x.detach().clone(), f, *maps), test_utils=CHECKS)


def test_a_second_derivative_of_another_manifold_raises():
    site, x = random_site(5, 3, "birkhoff"), torch.randn(4, 3, 5, requires_grad=True)
    h, merge = site(x)
    (g,) = torch.autograd.grad(merge(torch.tanh(h)).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(g.square().sum(), x)


def test_autocast_leaves_the_maps_alone():
    """Inside autocast the same numbers come out, bit for bit, forward and backward."""
    site, x, gy = random_site(16, 4), torch.randn(9, 4, 16), torch.randn(9, 4, 16)
    plain = run(site, x, torch.tanh, gy)
    with torch.autocast("cpu", torch.bfloat16):
        cast = run(site, x, torch.tanh, gy)
    for a, b in zip(plain, cast, strict=True):
        assert torch.equal(a, b)


def test_activation_checkpointing_changes_nothing():
    site, branch = random_site(16, 4), branch_for(16)
    x, gy = torch.randn(9, 4, 16), torch.randn(9, 4, 16)

    def block(x):
        h, merge = site(x)
        return merge(branch(h))

    plain = run(site, x, branch, gy)
    site.zero_grad()
    again = x.clone().requires_grad_()
    checkpoint(block, again, use_reentrant=False).backward(gy)
    for a, b in zip(plain[1:], (again.grad, site.fn.grad, site.base.grad, site.scale.grad), strict=True):
        assert torch.equal(a, b)


def test_saved_for_backward_is_counted():
    """Kept for the backward: x once, f, and under a hundred numbers a token. No normalised copy, no Sinkhorn history."""
    tokens, n, c = 64, 4, 128
    site, x = random_site(c, n), torch.randn(tokens, n, c, requires_grad=True)
    storages = {}

    def pack(t):
        storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    parameters = {p.untyped_storage().data_ptr() for p in site.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        h, merge = site(x)
        y = merge(h)
    kept = sum(size for pointer, size in storages.items() if pointer not in parameters)
    assert kept <= 4 * tokens * (n * c + c + 200)
    del y


@needs_compiler
@pytest.mark.compiler
@pytest.mark.parametrize("manifold", ["sinkhorn", "none", "birkhoff"])
def test_compiles_without_a_graph_break(manifold):
    """fullgraph, forward and backward, two token counts."""
    site, branch = random_site(16, 4, manifold), branch_for(16)

    def step(x):
        h, merge = site(x)
        return merge(branch(h))

    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for tokens in (9, 14):
        x, gy = torch.randn(tokens, 4, 16), torch.randn(tokens, 4, 16)
        eager = run(site, x, branch, gy)
        site.zero_grad()
        x = x.clone().requires_grad_()
        y = compiled(x)
        y.backward(gy)
        for a, b in zip(eager, (y, x.grad, site.fn.grad, site.base.grad, site.scale.grad), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("streams", [2, 4])
def test_exported_graph_is_small(streams):
    """A handful of nodes a site, whatever the number of Sinkhorn iterations."""
    from torch.export import export

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.site = random_site(8, streams, iterations=50)

        def forward(self, x):
            h, merge = self.site(x)
            return merge(torch.tanh(h))

    x = torch.randn(6, streams, 8)
    block = Block()
    program = export(block, (x,))
    assert len(program.graph.nodes) < 60
    torch.testing.assert_close(program.module()(x), block(x))
