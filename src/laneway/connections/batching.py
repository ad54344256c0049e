"""How the ops behave under ``torch.func.vmap``: many models of one shape, each with its own parameters, in one pass.

Importing this module registers the rules. What has no parameters (post-mixes, Sinkhorn) runs once over all models' tokens; a
pre-mix runs model after model through the kernels of one, since each has its own projection. No sum crosses models: a number
that is not finite stays in its own. Streams narrower than the kernels know (fp16) are widened for the kernel, which is exact, and
every result is rounded once, as it would be without vmap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from laneway.connections import control, ops, priorities, site_ops
from laneway.connections.backends import backend_for
from laneway.connections.kernels.eager import compute_dtype

Dims = Sequence[int | None]


def _batched(info: Any, dims: Dims, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Every tensor with the models first; what all models share is expanded."""
    size = info.batch_size
    return [
        None if t is None else t.movedim(dim, 0) if dim is not None else t.expand(size, *t.shape)
        for t, dim in zip(tensors, dims, strict=False)
    ]


def _rule(tensors: int, results: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A rule from a function of tensors [R, …], the first ``tensors`` arguments, to so many results, all [R, …]."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        def rule(info: Any, dims: Dims, *arguments: Any) -> tuple[Any, Any]:
            device = next(t.device.type for t in arguments if isinstance(t, Tensor))
            with torch.autocast(device, enabled=False):
                found = function(*_batched(info, dims, arguments[:tensors]), *arguments[tensors:])
            if results != (len(found) if isinstance(found, tuple) else 1):
                raise RuntimeError(f"{function.__name__} under vmap: not the {results} results that it has without")
            return found, tuple(0 for _ in found) if isinstance(found, tuple) else 0

        return rule

    return decorate


def _kernel_dtype(x: Tensor) -> torch.dtype:
    """What the kernels are given: fp16 is widened."""
    return x.dtype if x.dtype in (torch.bfloat16, torch.float32, torch.float64) else compute_dtype(x.dtype)


@torch.library.custom_op("laneway::mhc_pre_models", mutates_args=())
def mhc_pre_models(
    x: Tensor, carried: Tensor | None, fn: Tensor, base: Tensor, scale: Tensor, norm_eps: float, eps: float, cap: float,
    iterations: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """``mhc_pre`` of R models: x [R, …, n, C], each with its own parameters → h, maps [R, N, m], carry, z, r, read."""
    flat = x.to(_kernel_dtype(x)).reshape(x.shape[0], -1, *x.shape[-2:]).contiguous()
    pre = backend_for(flat).pre
    weights = [None] * len(flat) if carried is None else carried
    found = [pre(*site, norm_eps, eps, cap, iterations) for site in zip(flat, weights, fn, base, scale, strict=True)]
    h, maps, z, r = (torch.stack(parts) for parts in zip(*found, strict=True))
    read = ops._token(maps.new_empty(1).expand(*maps.shape[:2], x.shape[-2]))
    return h.to(x.dtype).view(*x.shape[:-2], x.shape[-1]), maps, ops._token(x), z, r.flatten(1), read


def _pre_setup(ctx, inputs, output) -> None:
    x, carried, fn, base, scale, _, *ctx.options = inputs
    _, maps, _, z, r, _ = output
    ctx.mark_non_differentiable(z, r)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, carried, fn, base, scale, maps, z, r)


def _pre_vjp(ctx, gh, gmaps, gcarry, _z, _r, read):
    x, carried, *tensors = ctx.saved_tensors
    dtype, models = _kernel_dtype(x), x.shape[0]

    def each(t: Tensor | None, dims: int) -> Sequence[Tensor | None]:
        """Model by model, tokens flat, in the kernels' dtype."""
        if t is None:
            return [None] * models
        return t.to(dtype).reshape(models, -1, *t.shape[t.ndim - dims :]).contiguous().unbind()

    backward = backend_for(x.to(dtype)).pre_backward
    maps_gradient = [None] * models if gmaps is None else gmaps.contiguous()
    other = carried if read is None else read
    weights = [None] * models if other is None else other.contiguous()
    columns = each(gcarry, 2), each(gh, 1), maps_gradient, each(x, 2), weights, *tensors
    found = [backward(*site, *ctx.options) for site in zip(*columns, strict=True)]
    gx, *grads, gcarried = zip(*found, strict=True)
    of_x = torch.stack(gx).to(x.dtype).view(x.shape)
    return of_x, None if carried is None else torch.stack(gcarried), *map(torch.stack, grads), *[None] * 4


mhc_pre_models.register_autograd(_pre_vjp, setup_context=_pre_setup)


@torch.library.custom_op("laneway::post_mix_models", mutates_args=())
def post_mix_models(x: Tensor, carry: Tensor, f: Tensor, post: Tensor, res: Tensor) -> Tensor:
    """``ops.post_mix`` through a whole site's kernels, whatever made H_res: nothing in it belongs to one model."""
    maps = torch.cat([torch.zeros_like(post), post, res.flatten(1)], 1)
    return _tokens(backend_for(x).post, maps, x, f)


def _post_mix_setup(ctx, inputs, output) -> None:
    x, _, f, post, res = inputs
    ctx.save_for_backward(x, f, post, res)


def _post_mix_vjp(ctx, gy):
    x, f, post, res = ctx.saved_tensors
    n, backend, none = x.shape[-2], backend_for(x), torch.zeros_like(post)
    gx = _tokens(backend.post, torch.cat([none, none, res.mT.flatten(1)], 1), gy, torch.zeros_like(f))
    maps = torch.cat([none, post, res.flatten(1)], 1)
    gf, gmaps = backend.post_backward(ops._flat(gy, 2), ops._flat(x, 2), ops._flat(f, 1), maps)
    return None, gx, gf.view(f.shape), gmaps[:, n : 2 * n], gmaps[:, 2 * n :].unflatten(1, (n, n))


post_mix_models.register_autograd(_post_mix_vjp, setup_context=_post_mix_setup)


def _tokens(post: Callable[..., Tensor], maps: Tensor, x: Tensor, f: Tensor) -> Tensor:
    return post(ops._flat(x, 2), ops._flat(f, 1), maps).view(x.shape)


def _widened(function: Callable[..., Tensor], x: Tensor, carry: Tensor, f: Tensor, *maps: Tensor) -> Tensor:
    """``function`` of streams and f in one dtype that the kernels know, rounded back."""
    dtype = torch.promote_types(_kernel_dtype(x), f.dtype)
    return function(x.to(dtype), carry.to(dtype), f.to(dtype), *maps).to(x.dtype)


def _post(x: Tensor, carry: Tensor, f: Tensor, maps: Tensor) -> Tensor:
    return _widened(site_ops.mhc_post, x, carry, f, maps.flatten(0, 1))


def _pre(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return mhc_pre_models(x, *rest)


def _cross(x, carry, f, maps, *site: Any) -> tuple[Tensor, ...]:
    y = _post(x, carry, f, maps)
    return y, *_pre(y, *site)


def _pre_mix(x, fn, base, scale, per_stream: bool, norm_eps: float, eps: float) -> tuple[Tensor, ...]:
    """``ops.pre_mix`` of R models, out of differentiable operations; the carry is x itself."""
    models, n, c = x.shape[0], *x.shape[-2:]
    wide = x.to(compute_dtype(x.dtype)).reshape(models, -1, n, c)
    rows = wide.flatten(1, 2) if per_stream else wide.flatten(2)
    r = (rows.square().mean(-1, keepdim=True) + norm_eps).rsqrt()
    z = torch.bmm(rows, fn.mT) * r
    width = base.shape[-1]
    arranged, factor = z, scale
    if per_stream:
        parts = z.view(models, -1, n, n + 2).tanh()
        arranged = torch.cat([parts[..., 0], parts[..., 1], parts[..., 2:].flatten(2)], -1)
    if scale.shape[-1] == 3:
        factor = torch.cat([scale[:, i : i + 1].expand(-1, w) for i, w in enumerate((n, n, width - 2 * n))], -1)
    logits = torch.addcmul(base[:, None], arranged, factor[:, None])
    pre = logits[..., :n] if per_stream else logits[..., :n].sigmoid() + eps
    h = (pre.unsqueeze(-2) @ wide).to(x.dtype).view(*x.shape[:-2], c)
    tokens = wide.shape[1]
    return h, logits, x.view_as(x), z.detach().view(models, tokens, -1), r.detach().view(models, tokens, -1)


def _post_mix(x: Tensor, carry: Tensor, f: Tensor, post: Tensor, res: Tensor) -> Tensor:
    return _widened(post_mix_models, x, carry, f, post.flatten(0, 1), res.flatten(0, 1))


def _sinkhorn(logits: Tensor, n: int, iterations: int, eps: float) -> Tensor:
    return ops.sinkhorn(logits.flatten(0, 1), n, iterations, eps).unflatten(0, logits.shape[:2])


def _read(h: Tensor, x: Tensor, *maps: Tensor) -> Tensor:
    return site_ops.mhc_read(h, x, *(each.flatten(0, 1) for each in maps))


def _add_read(h: Tensor, x: Tensor, change: Tensor) -> Tensor:
    return control.add_read(h, x, change.flatten(0, 1))


def _res_token(x: Tensor, res: Tensor) -> Tensor:
    return control.res_token(x, res.flatten(0, 1))


for _op, _tensors, _function in (
    (ops.pre_mix, 4, _pre_mix),
    (ops.post_mix, 5, _post_mix),
    (ops.sinkhorn, 1, _sinkhorn),
    (site_ops.mhc_pre, 5, _pre),
    (site_ops.mhc_post, 4, _post),
    (site_ops.mhc_cross, 8, _cross),
    (site_ops.mhc_read, 5, _read),
    (control.add_read, 3, _add_read),
    (control.res_token, 2, _res_token),
    (priorities.metered_use, 2, priorities.metered_use),
):
    _op.register_vmap(_rule(_tensors, len(_op._opoverload._schema.returns))(_function))
