"""A whole mHC site in plain PyTorch, on any device and in any floating-point dtype: what serves where no kernel does."""

from __future__ import annotations

import torch
from torch import Tensor

from laneway.connections.kernels import eager, sinkhorn


def pre(x, carried, fn, base, scale, norm_eps, eps, cap, iterations):
    """→ h, maps, z, r."""
    h, logits, z, r = eager.pre_forward(x, fn, base, scale, False, norm_eps, eps, carried)
    return h, _finish(logits, x.shape[1], eps, cap, iterations), z, r


def post(x, f, maps):
    """→ y."""
    return eager.post_forward(x, f, *_split(maps, x.shape[1])[1:])


def cross(x, f, maps, carried, fn, base, scale, norm_eps, eps, cap, iterations):
    """→ y, h, maps, z, r."""
    y = post(x, f, maps)
    return y, *pre(y, carried, fn, base, scale, norm_eps, eps, cap, iterations)


def post_backward(gy, x, f, maps):
    """→ gf, gmaps."""
    _, h_post, h_res = _split(maps, x.shape[1])
    gf, gpost, gres = eager.branch_backward(gy, x, f, h_post, h_res)
    return gf, torch.cat([torch.zeros_like(gpost), gpost, gres.flatten(1)], dim=1)


def pre_backward(gy, gh, gmaps, x, carried, fn, base, scale, maps, z, r, eps, cap, iterations):
    """→ gx, gfn, gbase, gscale, gcarried."""
    n = x.shape[1]
    gx = torch.zeros_like(x) if gy is None else eager.post_forward(gy, None, None, _split(maps, n)[2].transpose(1, 2))
    gh = x.new_zeros(x.shape[0], x.shape[2]) if gh is None else gh
    gmaps = torch.zeros_like(maps) if gmaps is None else gmaps
    gcarried = None if carried is None else torch.empty_like(carried)
    glogits = _finish_backward(gmaps, z, base, scale, n, eps, cap, iterations)
    grads = eager.pre_backward(gx, gh, glogits, x, fn, base, scale, z, r, False, eps, carried, gcarried)
    return gx, *grads, gcarried


def cross_backward(
    gnext, gy, gh, gmaps, x, f, maps, y, carried, fn, base, scale, next_maps, z, r, eps, cap, iterations
):  # fmt: skip
    """→ g, gf, gmaps, gfn, gbase, gscale, gcarried."""
    g, *grads = pre_backward(gnext, gh, gmaps, y, carried, fn, base, scale, next_maps, z, r, eps, cap, iterations)
    if gy is not None:
        g += gy
    return g, *post_backward(g, x, f, maps), *grads


def _split(maps: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of H_pre [N, n], H_post [N, n] and H_res [N, out, in]."""
    h_pre, h_post, h_res = maps.split([n, n, n * n], dim=1)
    return h_pre, h_post, h_res.unflatten(1, (n, n))


def _finish(logits: Tensor, n: int, eps: float, cap: float, iterations: int) -> Tensor:
    """Logits [N, m] → maps [N, m]."""
    h_pre, h_post, res = logits.split([n, n, n * n], dim=1)
    if cap:
        res = torch.tanh(res / cap) * cap
    h_res = sinkhorn.forward(res, n, iterations, eps)
    return torch.cat([torch.sigmoid(h_pre) + eps, 2 * torch.sigmoid(h_post), h_res.flatten(1)], dim=1)


def _finish_backward(gmaps, z, base, scale, n: int, eps: float, cap: float, iterations: int) -> Tensor:
    """Gradient of the maps → gradient of the logits."""
    widths = [n, n, n * n]
    factor = torch.cat([part.expand(width) for part, width in zip(scale.to(z.dtype), widths, strict=True)])
    h_pre, h_post, res = torch.addcmul(base.to(z.dtype), z, factor).split(widths, dim=1)
    gpre, gpost, gres = gmaps.split(widths, dim=1)
    used = torch.tanh(res / cap) * cap if cap else res
    gres = sinkhorn.backward(gres.unflatten(1, (n, n)), used, n, iterations, eps)
    if cap:
        gres = gres * 4 * _sigmoid_slope(2 / cap * res)
    return torch.cat([gpre * _sigmoid_slope(h_pre), 2 * gpost * _sigmoid_slope(h_post), gres], dim=1)


def _sigmoid_slope(h: Tensor) -> Tensor:
    """Its derivative, not as a (1 − a): that loses all digits where a is near one."""
    return torch.sigmoid(h) * torch.sigmoid(-h)
