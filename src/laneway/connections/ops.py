"""The ops of a hyper-connection, registered with ``torch.library``: what eager code, torch.compile and export all call.

    laneway::pre_mix    x, φ            → h, z, r, carry      projection, H_pre and the sub-layer's input
    laneway::sinkhorn   logits          → H_res
    laneway::post_mix   x, carry, f, …  → y                   the streams after the site

**carry** is how the streams' gradient travels. x is used twice, before the sub-layer and after it, and autograd would add the
two gradients in a pass of its own. Instead pre_mix also returns ``carry``, a token with the shape of x and no storage to
speak of, on which post_mix depends; its gradient is resᵀ gy, and pre_mix's backward adds the rest to it in place. It is
private to one site: ``HyperConnection`` hands it from one op to the other and nobody else sees it.

Every op computes in fp32 (float64 for float64 streams) and switches autocast off inside. The backward ops have no
derivative of their own: a second backward raises instead of giving something wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar

import torch
from torch import Tensor

from laneway.connections.kernels import eager
from laneway.connections.kernels import sinkhorn as soa

R = TypeVar("R")


def _exact(kernel: Callable[..., R]) -> Callable[..., R]:
    """Run a kernel outside autocast, which would otherwise round its products to bf16."""

    @wraps(kernel)
    def run(first: Tensor, *args) -> R:
        with torch.autocast(first.device.type, enabled=False):
            return kernel(first, *args)

    return run


def _fresh(t: Tensor) -> Tensor:
    """What a kernel returns for a gradient of t: its shape and dtype, contiguous."""
    return torch.empty_like(t, memory_format=torch.contiguous_format)


@torch.library.custom_op("laneway::pre_mix", mutates_args=())
@_exact
def pre_mix(
    x: Tensor, fn: Tensor, base: Tensor, scale: Tensor, groups: int, kind: str, norm_eps: float, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [N, n, C], fn [m, nC/groups], base [n] and scale [] of H_pre → h [N, C], z [N, groups·m], r [N, groups], carry."""
    h, z, r = eager.pre_forward(x, fn, base, scale, groups, kind, norm_eps, eps)
    return h, z, r, x.new_zeros(()).expand(x.shape)


@pre_mix.register_fake
def _(x, fn, base, scale, groups, kind, norm_eps, eps):
    tokens, _, c = x.shape
    dtype = eager.compute_dtype(x.dtype)
    z = x.new_empty(tokens, groups * fn.shape[0], dtype=dtype)
    return x.new_empty(tokens, c), z, x.new_empty(tokens, groups, dtype=dtype), x.new_zeros(()).expand(x.shape)


@torch.library.custom_op("laneway::pre_mix_backward", mutates_args={"gx"})
def pre_mix_backward(
    gx: Tensor, gh: Tensor, gz: Tensor, x: Tensor, fn: Tensor, base: Tensor, scale: Tensor, z: Tensor, r: Tensor,
    groups: int, kind: str, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Adds to gx in place; returns the gradients of fn, base and scale."""
    return _exact(eager.pre_backward)(gx, gh, gz, x, fn, base, scale, z, r, groups, kind, eps)


@pre_mix_backward.register_fake
def _(gx, gh, gz, x, fn, base, scale, z, r, groups, kind, eps):
    return _fresh(fn), _fresh(base), _fresh(scale)


def _pre_setup(ctx, inputs, output) -> None:
    x, fn, base, scale, groups, kind, _, eps = inputs
    _, z, r, _ = output
    ctx.mark_non_differentiable(r)
    ctx.save_for_backward(x, fn, base, scale, z, r)
    ctx.groups, ctx.kind, ctx.eps = groups, kind, eps


def _pre_vjp(ctx, gh, gz, _gr, gx):
    x, fn, base, scale, z, r = ctx.saved_tensors
    gx = gx.contiguous()
    grads = pre_mix_backward(gx, gh.contiguous(), gz, x, fn, base, scale, z, r, ctx.groups, ctx.kind, ctx.eps)
    return gx, *grads, None, None, None, None


pre_mix.register_autograd(_pre_vjp, setup_context=_pre_setup)


@torch.library.custom_op("laneway::sinkhorn", mutates_args=())
@_exact
def sinkhorn(logits: Tensor, n: int, iterations: int, eps: float) -> Tensor:
    """Logits [N, n·n] laid out [in, out] → H_res [N, out, in]; the derivative is that of the iteration that was run."""
    return soa.forward(logits, n, iterations, eps)


@sinkhorn.register_fake
def _(logits, n, iterations, eps):
    return logits.new_empty(logits.shape[0], n, n)


@torch.library.custom_op("laneway::sinkhorn_backward", mutates_args=())
@_exact
def sinkhorn_backward(grad: Tensor, logits: Tensor, n: int, iterations: int, eps: float) -> Tensor:
    """Gradient of the logits; the iteration is run again, nothing was kept."""
    return soa.backward(grad, logits, n, iterations, eps)


@sinkhorn_backward.register_fake
def _(grad, logits, n, iterations, eps):
    return logits.new_empty(logits.shape)


def _sinkhorn_setup(ctx, inputs, output) -> None:
    logits, ctx.n, ctx.iterations, ctx.eps = inputs
    ctx.save_for_backward(logits)


def _sinkhorn_vjp(ctx, grad):
    (logits,) = ctx.saved_tensors
    return sinkhorn_backward(grad, logits, ctx.n, ctx.iterations, ctx.eps), None, None, None


sinkhorn.register_autograd(_sinkhorn_vjp, setup_context=_sinkhorn_setup)


@torch.library.custom_op("laneway::post_mix", mutates_args=())
@_exact
def post_mix(x: Tensor, carry: Tensor, f: Tensor, post: Tensor, res: Tensor) -> Tensor:
    """y = H_res x + H_postᵀ f: x [N, n, C], f [N, C], post [N, n], res [N, out, in] → [N, n, C].

    ``carry`` holds no numbers; x's gradient is returned as its gradient.
    """
    return eager.post_forward(x, f, post, res)


@post_mix.register_fake
def _(x, carry, f, post, res):
    return _fresh(x)


@torch.library.custom_op("laneway::post_mix_backward", mutates_args=())
@_exact
def post_mix_backward(gy: Tensor, x: Tensor, f: Tensor, post: Tensor, res: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x (through H_res), f, post and res."""
    return eager.post_backward(gy, x, f, post, res)


@post_mix_backward.register_fake
def _(gy, x, f, post, res):
    return _fresh(x), _fresh(f), _fresh(post), _fresh(res)


def _post_setup(ctx, inputs, output) -> None:
    x, _, f, post, res = inputs
    ctx.save_for_backward(x, f, post, res)


def _post_vjp(ctx, gy):
    x, f, post, res = ctx.saved_tensors
    gx, gf, gpost, gres = post_mix_backward(gy.contiguous(), x, f, post, res)
    return None, gx, gf, gpost, gres


post_mix.register_autograd(_post_vjp, setup_context=_post_setup)
