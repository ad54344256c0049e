"""The contract in float64 by ``reference.py`` and autograd, and fresh inputs for it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from laneway.connections import reference


@dataclass
class Case:
    """One site's inputs and options. ``bits``: relative rounding error of a result in the streams' dtype."""

    x: Tensor
    f: Tensor
    fn: Tensor
    base: Tensor
    scale: Tensor
    carried: Tensor | None
    norm_eps: float = 1e-6
    eps: float = 0.0
    cap: float = 8.0
    iterations: int = 20

    def wide(self) -> Case:
        """The same in float64, requiring gradients."""
        tensors = {k: v.detach().double().requires_grad_() for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **tensors)

    def token(self, index: slice) -> Case:
        """Some of the tokens."""
        carried = None if self.carried is None else self.carried[index]
        return replace(self, x=self.x[index], f=self.f[index], carried=carried)

    @property
    def parameters(self):
        return self.fn, self.base, self.scale

    @property
    def forward_options(self):
        return self.norm_eps, self.eps, self.cap, self.iterations

    @property
    def backward_options(self):
        return self.eps, self.cap, self.iterations


def case(tokens: int, n: int, width: int, dtype=torch.float32, *, carried=False, spread=1.0, **options) -> Case:
    m = n * (n + 2)
    return Case(
        x=torch.randn(tokens, n, width).to(dtype),
        f=torch.randn(tokens, width).to(dtype),
        fn=torch.randn(m, n * width) * (n * width) ** -0.5,
        base=torch.randn(m) * spread,
        scale=torch.rand(3) + 0.5,
        carried=torch.rand(tokens, n) if carried else None,
        **options,
    )


def maps(x: Tensor, c: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Finished maps [N, m], z, r."""
    r = (x.flatten(1).square().mean(1) + c.norm_eps).rsqrt()
    z = r[:, None] * (x.flatten(1) @ c.fn.T)
    pre, post, res = reference.map_logits(x, *c.parameters, c.norm_eps)
    h_res = reference.sinkhorn(reference.cap_logits(res, c.cap or None), c.iterations, c.eps)
    return torch.cat([reference.pre_map(pre, c.eps), reference.post_map(post), h_res.flatten(1)], 1), z, r


def pre(x: Tensor, c: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    new, z, r = maps(x, c)
    return reference.pre_mix(x, new[:, : x.shape[1]] if c.carried is None else c.carried), new, z, r


def post(x: Tensor, f: Tensor, finished: Tensor) -> Tensor:
    n = x.shape[1]
    return reference.post_mix(x, f, finished[:, n : 2 * n], finished[:, 2 * n :].unflatten(1, (n, n)))


def finished_maps(tokens: int, n: int) -> Tensor:
    """Any maps: [N, m] with a doubly stochastic part."""
    logits = torch.randn(tokens, n, n)
    return torch.cat([torch.rand(tokens, n), 2 * torch.rand(tokens, n), reference.sinkhorn(logits).flatten(1)], 1)


def error(got: Tensor, want: Tensor) -> float:
    """Largest error relative to the largest true value; 0 where both are empty or zero."""
    assert got.shape == want.shape, (got.shape, want.shape)
    if not want.numel() or not (scale := want.abs().max().item()):
        return got.double().abs().max().item() if got.numel() else 0.0
    return ((got.double() - want.detach()).abs().max() / scale).item()
