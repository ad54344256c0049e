"""The ops of an mHC site (Sinkhorn maps), registered with ``torch.library``. kernels/__init__.py says what each computes.

    laneway::mhc_pre     x, parameters → h, maps, carry (and z, r for the backward, and read)
    laneway::mhc_post    x, carry, f, maps → y
    laneway::mhc_cross   x, carry, f, maps, the next site's parameters → y, h, maps, carry, …
    laneway::mhc_read    h, x, H_pre, other weights, read → Σ_i weights_i x_i

**carry** is how the streams' gradient travels. x is used twice, before the sub-layer and after it, and autograd would add the two
gradients in a pass of its own. Instead a pre also returns ``carry``, a token with the shape of x and no storage to speak of, on
which the following post depends. Post's backward hands on gy itself as the gradient of carry, and pre's backward does the rest,
H_resᵀ included, in the one pass that writes x's gradient. ``carry`` is private to a site and its merge.

**read** is how other weights than H_pre reach that pass, where a control mixes h anew: a token [N, n] whose gradient are those
weights. ``mhc_read`` depends on it, and pre's backward then gives x the gradient of Σ_i weights_i x_i in H_pre's place.

Each call is served by the backend that ``backends.backend_for`` chooses. The backward ops have a derivative of their own, taken
through the reference: gradient penalties and Hessian-vector products work, slowly; a third derivative raises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from laneway.connections import reference
from laneway.connections.backends import backend_for
from laneway.connections.kernels.eager import compute_dtype
from laneway.connections.ops import _exact, _flat, _fresh, _token, _unflat


def _flat_or_none(t: Tensor | None, dims: int) -> Tensor | None:
    return None if t is None else _flat(t, dims)


def _none(x: Tensor) -> Tensor:
    """What stands for the gradient of an argument that was not given: ops return tensors."""
    return x.new_empty(0)


def _sizes(x: Tensor) -> tuple[int, int, torch.dtype]:
    return math.prod(x.shape[:-2]), x.shape[-2] * (x.shape[-2] + 2), compute_dtype(x.dtype)


def _fake_pre(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    tokens, m, dtype = _sizes(x)
    carry = torch.empty_strided(x.shape, [0] * x.ndim, dtype=x.dtype, device=x.device)
    read = torch.empty_strided((tokens, x.shape[-2]), [0, 0], dtype=dtype, device=x.device)
    maps, z, r = (x.new_empty(shape, dtype=dtype) for shape in ((tokens, m), (tokens, m), (tokens,)))
    return x.new_empty(*x.shape[:-2], x.shape[-1]), maps, carry, z, r, read


def _read_token(maps: Tensor, n: int) -> Tensor:
    """The token ``read``: [N, n] with the storage of one number, in the dtype of the maps."""
    return _token(maps.new_empty(1).expand(len(maps), n))


# ---------------------------------------------------------------- pre


@torch.library.custom_op("laneway::mhc_pre", mutates_args=())
@_exact
def mhc_pre(
    x: Tensor, carried: Tensor | None, fn: Tensor, base: Tensor, scale: Tensor, norm_eps: float, eps: float, cap: float,
    iterations: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """x […, n, C], carried [N, n] or None, fn [m, nC], base, scale [3] → h […, C], maps [N, m], carry […, n, C], z, r, read."""
    h, maps, z, r = backend_for(x).pre(_flat(x, 2), carried, fn, base, scale, norm_eps, eps, cap, iterations)
    return _unflat(h, x.shape[:-2] + x.shape[-1:]), maps, _token(x), z, r.view(-1), _read_token(maps, x.shape[-2])


@mhc_pre.register_fake
def _(x, carried, fn, base, scale, norm_eps, eps, cap, iterations):
    return _fake_pre(x)


@torch.library.custom_op("laneway::mhc_pre_backward", mutates_args=())
@_exact
def mhc_pre_backward(
    x: Tensor, gy: Tensor | None, gh: Tensor | None, gmaps: Tensor | None, carried: Tensor | None, fn: Tensor, base: Tensor,
    scale: Tensor, maps: Tensor, z: Tensor, r: Tensor, norm_eps: float, eps: float, cap: float, iterations: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, fn, base, scale and carried (empty where there is none)."""
    gx, *grads, gcarried = backend_for(x).pre_backward(
        _flat_or_none(gy, 2), _flat_or_none(gh, 1), _flat_or_none(gmaps, 1), _flat(x, 2), carried, fn, base, scale, maps, z,
        r, eps, cap, iterations,
    )  # fmt: skip
    return _unflat(gx, x.shape), *grads, _none(x) if gcarried is None else gcarried


@mhc_pre_backward.register_fake
def _(x, gy, gh, gmaps, carried, fn, base, scale, maps, z, r, norm_eps, eps, cap, iterations):
    return _fresh(x), _fresh(fn), _fresh(base), _fresh(scale), _none(x) if carried is None else _fresh(carried)


def _pre_setup(ctx, inputs, output) -> None:
    x, carried, fn, base, scale, *ctx.options = inputs
    _, maps, _, z, r, _ = output
    ctx.mark_non_differentiable(z, r)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, carried, fn, base, scale, maps, z, r)


def _pre_vjp(ctx, gh, gmaps, gcarry, _z, _r, read):
    x, carried, fn, base, scale, maps, z, r = ctx.saved_tensors
    weights = carried if read is None else read
    gx, *grads, gcarried = mhc_pre_backward(x, gcarry, gh, gmaps, weights, fn, base, scale, maps, z, r, *ctx.options)
    return gx, None if carried is None else gcarried, *grads, None, None, None, None


mhc_pre.register_autograd(_pre_vjp, setup_context=_pre_setup)


# ---------------------------------------------------------------- post


@torch.library.custom_op("laneway::mhc_post", mutates_args=())
@_exact
def mhc_post(x: Tensor, carry: Tensor, f: Tensor, maps: Tensor) -> Tensor:
    """y = H_res x + H_postᵀ f: x […, n, C], f […, C], maps [N, m] → […, n, C]. ``carry`` holds no numbers."""
    return _unflat(backend_for(x, f).post(_flat(x, 2), _flat(f, 1), maps), x.shape)


@mhc_post.register_fake
def _(x, carry, f, maps):
    return _fresh(x)


@torch.library.custom_op("laneway::mhc_post_backward", mutates_args=())
@_exact
def mhc_post_backward(gy: Tensor, x: Tensor, f: Tensor, maps: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of f and of the maps."""
    gf, gmaps = backend_for(x, f).post_backward(_flat(gy, 2), _flat(x, 2), _flat(f, 1), maps)
    return _unflat(gf, f.shape), gmaps


@mhc_post_backward.register_fake
def _(gy, x, f, maps):
    return _fresh(f), _fresh(maps)


def _post_setup(ctx, inputs, output) -> None:
    x, _, f, maps = inputs
    ctx.save_for_backward(x, f, maps)


def _post_vjp(ctx, gy):
    x, f, maps = ctx.saved_tensors
    gy = gy.contiguous()
    return None, gy, *mhc_post_backward(gy, x, f, maps)


mhc_post.register_autograd(_post_vjp, setup_context=_post_setup)


# ---------------------------------------------------------------- cross


@torch.library.custom_op("laneway::mhc_cross", mutates_args=())
@_exact
def mhc_cross(
    x: Tensor, carry: Tensor, f: Tensor, maps: Tensor, carried: Tensor | None, fn: Tensor, base: Tensor, scale: Tensor,
    norm_eps: float, eps: float, cap: float, iterations: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Post of one site and pre of the next, whose parameters these are → y, h, maps, carry, z, r, read."""
    y, h, maps, z, r = backend_for(x, f).cross(
        _flat(x, 2), _flat(f, 1), maps, carried, fn, base, scale, norm_eps, eps, cap, iterations
    )
    return _unflat(y, x.shape), _unflat(h, f.shape), maps, _token(x), z, r, _read_token(maps, x.shape[-2])


@mhc_cross.register_fake
def _(x, carry, f, maps, carried, fn, base, scale, norm_eps, eps, cap, iterations):
    return _fresh(x), *_fake_pre(x)


@torch.library.custom_op("laneway::mhc_cross_backward", mutates_args=())
@_exact
def mhc_cross_backward(
    gnext: Tensor | None, gy: Tensor | None, gh: Tensor | None, gmaps: Tensor | None, x: Tensor, f: Tensor, maps: Tensor,
    y: Tensor, carried: Tensor | None, fn: Tensor, base: Tensor, scale: Tensor, next_maps: Tensor, z: Tensor, r: Tensor,
    norm_eps: float, eps: float, cap: float, iterations: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of y, f, maps, fn, base, scale and carried (empty where there is none)."""
    g, gf, *grads, gcarried = backend_for(x, f).cross_backward(
        _flat_or_none(gnext, 2), _flat_or_none(gy, 2), _flat_or_none(gh, 1), _flat_or_none(gmaps, 1), _flat(x, 2), _flat(f, 1),
        maps, _flat(y, 2), carried, fn, base, scale, next_maps, z, r, eps, cap, iterations,
    )  # fmt: skip
    return _unflat(g, x.shape), _unflat(gf, f.shape), *grads, _none(x) if gcarried is None else gcarried


@mhc_cross_backward.register_fake
def _(gnext, gy, gh, gmaps, x, f, maps, y, carried, fn, base, scale, next_maps, z, r, norm_eps, eps, cap, iterations):
    gcarried = _none(x) if carried is None else _fresh(carried)
    return _fresh(x), _fresh(f), _fresh(maps), _fresh(fn), _fresh(base), _fresh(scale), gcarried


def _cross_setup(ctx, inputs, output) -> None:
    x, _, f, maps, carried, fn, base, scale, *ctx.options = inputs
    y, _, next_maps, _, z, r, _ = output
    ctx.mark_non_differentiable(z, r)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, f, maps, y, carried, fn, base, scale, next_maps, z, r)


def _cross_vjp(ctx, gy, gh, gmaps, gnext, _z, _r, read):
    x, f, maps, y, carried, *rest = ctx.saved_tensors
    weights = carried if read is None else read
    g, gf, gbefore, *grads, gcarried = mhc_cross_backward(gnext, gy, gh, gmaps, x, f, maps, y, weights, *rest, *ctx.options)
    return None, g, gf, gbefore, None if carried is None else gcarried, *grads, None, None, None, None


mhc_cross.register_autograd(_cross_vjp, setup_context=_cross_setup)


# ---------------------------------------------------------------- read


@torch.library.custom_op("laneway::mhc_read", mutates_args=())
@_exact
def mhc_read(h: Tensor, x: Tensor, pre: Tensor, weights: Tensor, read: Tensor) -> Tensor:
    """Σ_i weights_i x_i […, C], from h = Σ_i pre_i x_i: bit for bit h where the weights are H_pre.

    x […, n, C], pre and weights [N, n]. x and H_pre get their gradients from the pre that made h (see the module's docstring).
    """
    return mixed_anew(h, x, weights - pre)


@mhc_read.register_fake
def _(h, x, pre, weights, read):
    return _fresh(h)


def mixed_anew(h: Tensor, x: Tensor, change: Tensor) -> Tensor:
    """h + Σ_i change_i x_i […, C], summed in change's precision."""
    rows, wide = _flat(x, 2).to(change.dtype), _flat(h, 1).to(change.dtype)
    return torch.baddbmm(wide.unsqueeze(1), change.unsqueeze(1), rows).to(h.dtype).view(h.shape)


def _read_setup(ctx, inputs, output) -> None:
    _, x, _, weights, _ = inputs
    ctx.save_for_backward(x, weights)


def _read_vjp(ctx, gh):
    x, weights = ctx.saved_tensors
    return gh, None, None, read_gradient(gh, x, weights.dtype), weights.contiguous()


def read_gradient(gh: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Gradient [N, n] of the weights that mix streams x […, n, C] into an h with gradient gh […, C]; has a derivative."""
    with torch.autocast(x.device.type, enabled=False):
        return (gh.reshape(-1, 1, x.shape[-1]).to(dtype) @ x.reshape(-1, *x.shape[-2:]).to(dtype).mT).squeeze(1)


mhc_read.register_autograd(_read_vjp, setup_context=_read_setup)


# ---------------------------------------------------------------- second derivatives, through the reference


def _reference_pre(x, carried, fn, base, scale, norm_eps, eps, cap, iterations):
    """h […, C] and maps [N, m], in the parameters' precision, out of differentiable PyTorch."""
    dtype = compute_dtype(x.dtype)
    wide = x.to(dtype)
    pre, post, res = reference.map_logits(wide, fn.to(dtype), base.to(dtype), scale.to(dtype), norm_eps)
    pre = reference.pre_map(pre, eps)
    res = reference.sinkhorn(reference.cap_logits(res, cap or None), iterations, eps)
    weights = pre if carried is None else carried.to(dtype).view(pre.shape)
    maps = torch.cat([pre, reference.post_map(post), res.flatten(-2)], dim=-1)
    return reference.pre_mix(wide, weights).to(x.dtype), maps.flatten(0, -2) if maps.ndim > 1 else maps[None]


def _reference_post(x, f, maps):
    dtype, n = compute_dtype(x.dtype), x.shape[-2]
    _, post, res = maps.view(*x.shape[:-2], -1).split([n, n, n * n], dim=-1)
    return reference.post_mix(x.to(dtype), f.to(dtype), post, res.unflatten(-1, (n, n))).to(x.dtype)


def _again(
    function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor | None], cotangents: Sequence[Tensor | None],
    wanted: Sequence[Tensor | None],
) -> tuple[list[Tensor | None], list[Tensor | None]]:  # fmt: skip
    """Derivative of a vector-Jacobian product: (gradients of ``inputs``, of ``cotangents``) given those of its results."""
    with torch.enable_grad():
        leaves = [None if t is None else t.detach().requires_grad_() for t in inputs]
        seeds = [None if t is None else t.detach().requires_grad_() for t in cotangents]
        outputs = [(out, seed) for out, seed in zip(function(*leaves), seeds, strict=True) if seed is not None]
        given = [t for t in leaves if t is not None]
        first = torch.autograd.grad(
            [out for out, _ in outputs], given, [seed for _, seed in outputs], create_graph=True, allow_unused=True
        )
        pairs = [(g, w) for g, w in zip(first, [w for t, w in zip(leaves, wanted, strict=True) if t is not None], strict=True)]
        pairs = [(g, w) for g, w in pairs if g is not None and w is not None and w.numel()]
        every = [t for t in [*leaves, *seeds] if t is not None]
        second = iter(
            torch.autograd.grad([g for g, _ in pairs], every, [w for _, w in pairs], allow_unused=True)
            if pairs
            else [None] * len(every)
        )
    found = [None if t is None else next(second) for t in [*leaves, *seeds]]
    return found[: len(leaves)], found[len(leaves) :]


def _reference_site(options: Sequence[float]) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """What a pre's backward is the derivative of: h, the maps, and the part of post that is linear in x, H_res x."""

    def function(x, carried, fn, base, scale, maps):
        h, own = _reference_pre(x, carried, fn, base, scale, *options)
        return h, own, _reference_post(x, torch.zeros_like(h), maps)

    return function


def _of_post(ggmaps: Tensor | None, n: int) -> Tensor | None:
    """Post has no gradient for H_pre: its part of the maps' gradient is a constant zero."""
    return None if ggmaps is None else torch.cat([torch.zeros_like(ggmaps[:, :n]), ggmaps[:, n:]], dim=1)


def _pre_backward_setup(ctx, inputs, output) -> None:
    x, gy, gh, gmaps, carried, fn, base, scale, maps, _, _, *ctx.options = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, gy, gh, gmaps, carried, fn, base, scale, maps)


def _pre_backward_vjp(ctx, ggx, *gg):
    x, gy, gh, gmaps, *rest = ctx.saved_tensors
    *ggp, ggcarried = gg
    wanted = (ggx, ggcarried, *ggp, None)
    (dx, *drest), (dgh, dgmaps, dgy) = _again(_reference_site(ctx.options), (x, *rest), (gh, gmaps, gy), wanted)
    return dx, dgy, dgh, dgmaps, *drest, None, None, None, None, None, None


mhc_pre_backward.register_autograd(_pre_backward_vjp, setup_context=_pre_backward_setup)


def _post_backward_setup(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs)


def _post_backward_vjp(ctx, ggf, ggmaps):
    gy, x, f, maps = ctx.saved_tensors
    return _post_again(x, f, maps, gy, ggf, ggmaps)


def _post_again(x: Tensor, f: Tensor, maps: Tensor, gy: Tensor, ggf: Tensor | None, ggmaps: Tensor | None):
    """Gradients of gy, x, f and maps, given those of gf and gmaps."""
    wanted = (None, ggf, _of_post(ggmaps, x.shape[-2]))
    first, (dgy,) = _again(lambda *inputs: (_reference_post(*inputs),), (x, f, maps), (gy,), wanted)
    return dgy, *first


mhc_post_backward.register_autograd(_post_backward_vjp, setup_context=_post_backward_setup)


def _cross_backward_setup(ctx, inputs, output) -> None:
    gnext, gy, gh, gmaps, x, f, maps, y, carried, fn, base, scale, next_maps, _, _, *ctx.options = inputs
    ctx.has_gy = gy is not None
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(gnext, gh, gmaps, x, f, maps, output[0], y, carried, fn, base, scale, next_maps)


def _cross_backward_vjp(ctx, ggg, ggf, ggmaps, *gg):
    """g, the gradient of y, is handed on; f's and the maps' gradients depend on it: chain the two halves by hand."""
    gnext, gh, gmaps, x, f, maps, g, *site = ctx.saved_tensors
    *ggp, ggcarried = gg
    dg, dx, df, dmaps = _post_again(x, f, maps, g, ggf, ggmaps)
    total = dg if ggg is None else ggg if dg is None else dg + ggg
    wanted = (total, ggcarried, *ggp, None)
    dsite, (dgh, dgmaps, dgnext) = _again(_reference_site(ctx.options), site, (gh, gmaps, gnext), wanted)
    return dgnext, total if ctx.has_gy else None, dgh, dgmaps, dx, df, dmaps, *dsite, *[None] * 6


mhc_cross_backward.register_autograd(_cross_backward_vjp, setup_context=_cross_backward_setup)
