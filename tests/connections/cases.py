"""Fresh random sites and the comparison with the float64 reference."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import laneway as lw
from laneway.connections import reference


def random_site(dim: int, streams: int, manifold: str = "sinkhorn", *, spread: float = 1.0, **options) -> lw.HyperConnection:
    """A site far from its start: random projection, biases of the given spread, scales around one."""
    site = lw.HyperConnection(dim, streams, manifold, disable=False, **options)
    with torch.no_grad():
        site.fn.normal_(std=site.fn.shape[1] ** -0.5)
        site.base.normal_(std=spread)
        site.scale.uniform_(0.5, 1.5)
    return site


def branch_for(dim: int) -> Callable[[Tensor], Tensor]:
    """A sub-layer in the dtype of its input, the same numbers for fp32 and float64."""
    weight = torch.randn(dim, dim).double() / dim**0.5
    return lambda h: torch.tanh(h @ weight.to(h.dtype))


def run(site: lw.HyperConnection, x: Tensor, branch, gy: Tensor) -> list[Tensor]:
    """[y, gradients of x, fn, base, scale] of the layer."""
    x = x.detach().requires_grad_()
    site.zero_grad()
    h, merge = site(x)
    y = merge(branch(h))
    y.backward(gy)
    return [y.detach(), x.grad, site.fn.grad, site.base.grad, site.scale.grad]


def run_reference(site: lw.HyperConnection, x: Tensor, branch, gy: Tensor) -> list[Tensor]:
    """The same by the reference in float64."""
    x, fn, base, scale = (t.detach().double().requires_grad_() for t in (x, site.fn, site.base, site.scale))
    if site.manifold == "none":
        y = reference.hc_connection(x, branch, fn, base, scale, norm_eps=site.norm_eps)
    else:
        options = {"iterations": site.iterations, "norm_eps": site.norm_eps, "eps": site.eps, "cap": site.cap}
        y = reference.connection(x, branch, fn, base, scale, **options)
    y.backward(gy.double())
    return [y.detach(), x.grad, fn.grad, base.grad, scale.grad]


def error(got: Tensor, want: Tensor) -> float:
    """Largest error relative to the largest true value; 0 where both are empty or zero."""
    if not want.numel() or not (scale := want.abs().max().item()):
        return got.double().abs().max().item() if got.numel() else 0.0
    return ((got.double() - want).abs().max() / scale).item()


def rms_error(got: Tensor, want: Tensor) -> float:
    """Root mean square error relative to the root mean square of the true values."""
    return ((got.double() - want).norm() / want.norm()).item()
