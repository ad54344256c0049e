"""A pre, a cross and a post with random numbers through a backend, and the same by the float64 reference."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from laneway.connections import reference


@dataclass
class Case:
    """Inputs of two sites in a row. ``carried``: the single-pass form."""

    tokens: int
    n: int
    c: int
    dtype: torch.dtype
    norm_eps: float = 1e-6
    eps: float = 0.0
    cap: float = 8.0
    iterations: int = 20
    carried: bool = False
    spread: float = 1.0

    def __post_init__(self) -> None:
        shape, m = (self.tokens, self.n, self.c), self.n * (self.n + 2)
        self.x, self.gy = (torch.randn(shape).to(self.dtype) for _ in range(2))
        self.f, self.gh, self.gh2 = (torch.randn(self.tokens, self.c).to(self.dtype) for _ in range(3))
        self.weights = torch.rand(self.tokens, self.n) if self.carried else None
        width = (self.n * self.c) ** 0.5
        self.first, self.second = (
            [self.spread * torch.randn(m, self.n * self.c) / width, self.spread * torch.randn(m), torch.rand(3) + 0.5]
            for _ in range(2)
        )
        self.options = self.norm_eps, self.eps, self.cap, self.iterations

    def through(self, backend) -> dict[str, Tensor]:
        """Results and gradients, the sub-layer's output f being given."""
        n, back = self.n, self.options[1:]
        h, maps, z, r = backend.pre(self.x, self.weights, *self.first, *self.options)
        own = maps[:, :n].contiguous() if self.carried else None
        y, h2, maps2, z2, r2 = backend.cross(self.x, self.f, maps, own, *self.second, *self.options)
        self.y = y
        out = backend.post(y, self.f, maps2)
        gf2, gmaps2 = backend.post_backward(self.gy, y, self.f, maps2)
        g, gf, gmaps, *second, gown = backend.cross_backward(
            self.gy, None, self.gh2, gmaps2, self.x, self.f, maps, y, own, *self.second, maps2, z2, r2, *back
        )
        if self.carried:
            gmaps = gmaps.clone()
            gmaps[:, :n] += gown
        gx, *first, gweights = backend.pre_backward(
            g, self.gh, gmaps, self.x, self.weights, *self.first, maps, z, r, *back
        )  # fmt: skip
        found = {"h": h, "maps": maps, "y": y, "h2": h2, "maps2": maps2, "out": out, "gx": gx, "gf": gf.double() + gf2.double()}
        found |= dict(zip(("gfn", "gbase", "gscale", "gfn2", "gbase2", "gscale2"), (*first, *second), strict=True))
        return found | ({"gcarried": gweights} if self.carried else {})

    def expected(self) -> dict[str, Tensor]:
        """The same in float64. Narrow streams between the sites are those that ``through`` rounded."""
        tensors = (self.x, self.f, *self.first, *self.second, *([self.weights] if self.carried else []))
        x, f, *rest = leaves = [t.double().requires_grad_() for t in tensors]
        first, second, weights = rest[:3], rest[3:6], rest[6] if self.carried else None
        pre, post, res = self._maps(x, first)
        h = reference.pre_mix(x, pre if weights is None else weights)
        y = reference.post_mix(x, f, post, res)
        if self.dtype != torch.float32:
            y = y + (self.y.double() - y).detach()
        pre2, post2, res2 = self._maps(y, second)
        h2 = reference.pre_mix(y, pre if self.carried else pre2)
        out = reference.post_mix(y, f, post2, res2)
        found = {"h": h, "maps": _flat(pre, post, res), "y": y, "h2": h2, "maps2": _flat(pre2, post2, res2), "out": out}
        seeds = (self.gh.double(), self.gh2.double(), self.gy.double())
        names = ("gx", "gf", "gfn", "gbase", "gscale", "gfn2", "gbase2", "gscale2", "gcarried")
        found |= dict(zip(names, torch.autograd.grad((h, h2, out), leaves, seeds), strict=False))
        return {name: t.detach() for name, t in found.items()}

    def _maps(self, x: Tensor, parameters: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        pre, post, res = reference.map_logits(x, *parameters, self.norm_eps)
        res = reference.sinkhorn(reference.cap_logits(res, self.cap or None), self.iterations, self.eps)
        return reference.pre_map(pre, self.eps), reference.post_map(post), res


def _flat(pre: Tensor, post: Tensor, res: Tensor) -> Tensor:
    return torch.cat([pre, post, res.flatten(1)], dim=1)
