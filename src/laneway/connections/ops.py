"""The ops of any manifold and of the read-out, registered with ``torch.library``: what eager code, torch.compile and export call.

Sinkhorn maps, the default, have faster ops of their own (site_ops.py); these leave the making of H_res to the manifold.

    laneway::pre_mix    x, parameters   → h, logits, carry    projection, H_pre and the sub-layer's input
    laneway::sinkhorn   logits          → H_res
    laneway::post_mix   x, carry, f, …  → y                   the streams after the site

**carry** is how the streams' gradient travels. x is used twice, before the sub-layer and after it, and autograd would add the
two gradients in a pass of its own. Instead pre_mix also returns ``carry``, a token with the shape of x and no storage to
speak of, on which post_mix depends; its gradient is resᵀ gy, and pre_mix's backward adds the rest to it in place. It is
private to one site: ``HyperConnection`` hands it from one op to the other and nobody else sees it.

Streams have any leading dims, and so have h and y; what belongs to one token is flattened to N tokens (z, maps).
Every op computes in fp32 (float64 for float64 streams) and switches autocast off inside. The backward ops have no
derivative of their own: a second backward raises instead of giving something wrong.
"""

from __future__ import annotations

import math
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
    def run(*args) -> R:
        device = next(a.device.type for a in args if isinstance(a, Tensor))
        with torch.autocast(device, enabled=False):
            return kernel(*args)

    return run


def _flat(t: Tensor, dims: int) -> Tensor:
    """All but the last ``dims`` dims as one, contiguous."""
    return t.reshape(math.prod(t.shape[:-dims]), *t.shape[-dims:]).contiguous()


def _unflat(t: Tensor, shape: torch.Size) -> Tensor:
    """A kernel's own result in another shape; not a view in autograd's sense, since nobody else holds ``t``."""
    return torch.ops.aten._unsafe_view(t, shape)


def _fresh(t: Tensor) -> Tensor:
    """What a kernel returns for a gradient of t: its shape and dtype, contiguous."""
    return torch.empty_like(t, memory_format=torch.contiguous_format)


@torch.library.custom_op("laneway::pre_mix", mutates_args=())
@_exact
def pre_mix(
    x: Tensor, fn: Tensor, base: Tensor, scale: Tensor, per_stream: bool, norm_eps: float, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The sub-layer's input and the logits of every map: all that depends on a site's parameters.

    x […, n, C], fn [m, nC/groups], base [w], scale [3] (or [1], for H_pre alone) → h […, C], logits [N, w] laid out pre,
    post, res, carry […, n, C], and for the backward z [N, groups·m] and r [N, groups].
    per_stream: every stream is a group of its own (HC); else vec(x) is the only one.
    """
    h, logits, z, r = eager.pre_forward(_flat(x, 2), fn, base, scale, per_stream, norm_eps, eps)
    return _unflat(h, x.shape[:-2] + x.shape[-1:]), logits, _token(x), z, r


@pre_mix.register_fake
def _(x, fn, base, scale, per_stream, norm_eps, eps):
    groups = x.shape[-2] if per_stream else 1
    tokens, dtype = math.prod(x.shape[:-2]), eager.compute_dtype(x.dtype)
    logits, z, r = (x.new_empty(tokens, width, dtype=dtype) for width in (base.shape[0], groups * fn.shape[0], groups))
    carry = torch.empty_strided(x.shape, [0] * x.ndim, dtype=x.dtype, device=x.device)
    return x.new_empty(*x.shape[:-2], x.shape[-1]), logits, carry, z, r


def _token(x: Tensor) -> Tensor:
    """A tensor with the shape of x and the storage of one number, a zero."""
    token = torch.empty_strided(x.shape, [0] * x.ndim, dtype=x.dtype, device=x.device)
    if x.numel():
        token.as_strided((), ()).zero_()  # filling the whole shape would write that one number x.numel() times
    return token


@torch.library.custom_op("laneway::pre_mix_backward", mutates_args={"gx"})
def pre_mix_backward(
    gx: Tensor, gh: Tensor, glogits: Tensor, x: Tensor, fn: Tensor, base: Tensor, scale: Tensor, z: Tensor, r: Tensor,
    per_stream: bool, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Adds to gx in place; returns the gradients of fn, base and scale."""
    return _exact(eager.pre_backward)(_flat(gx, 2), _flat(gh, 1), glogits, _flat(x, 2), fn, base, scale, z, r, per_stream, eps)


@pre_mix_backward.register_fake
def _(gx, gh, glogits, x, fn, base, scale, z, r, per_stream, eps):
    return _fresh(fn), _fresh(base), _fresh(scale)


def _pre_setup(ctx, inputs, output) -> None:
    x, fn, base, scale, ctx.per_stream, _, ctx.eps = inputs
    *_, z, r = output
    ctx.mark_non_differentiable(z, r)
    ctx.save_for_backward(x, fn, base, scale, z, r)


def _pre_vjp(ctx, gh, glogits, gx, *_):
    gx = gx.contiguous()
    grads = pre_mix_backward(gx, gh, glogits, *ctx.saved_tensors, ctx.per_stream, ctx.eps)
    return gx, *grads, None, None, None


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
    """y = H_res x + H_postᵀ f: x […, n, C], f […, C], post [N, n], res [N, out, in] → […, n, C].

    ``carry`` holds no numbers; x's gradient is returned as its gradient.
    """
    return _unflat(eager.post_forward(_flat(x, 2), _flat(f, 1), post, res.contiguous()), x.shape)


@post_mix.register_fake
def _(x, carry, f, post, res):
    return _fresh(x)


@torch.library.custom_op("laneway::post_mix_backward", mutates_args=())
@_exact
def post_mix_backward(gy: Tensor, x: Tensor, f: Tensor, post: Tensor, res: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x (through H_res), f, post and res."""
    gx, gf, gpost, gres = eager.post_backward(_flat(gy, 2), _flat(x, 2), _flat(f, 1), post, res)
    return _unflat(gx, x.shape), _unflat(gf, f.shape), gpost, gres


@post_mix_backward.register_fake
def _(gy, x, f, post, res):
    return _fresh(x), _fresh(f), _fresh(post), _fresh(res)


def _post_setup(ctx, inputs, output) -> None:
    x, _, f, post, res = inputs
    ctx.save_for_backward(x, f, post, res)


def _post_vjp(ctx, gy):
    x, f, post, res = ctx.saved_tensors
    gx, gf, gpost, gres = post_mix_backward(gy, x, f, post, res)
    return None, gx, gf, gpost, gres


post_mix.register_autograd(_post_vjp, setup_context=_post_setup)
