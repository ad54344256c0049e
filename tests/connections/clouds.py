"""Clouds of points of known curvature, and the estimate by its definition: float64, one token after another."""

from __future__ import annotations

import torch
from torch import Tensor


def rotated(y: Tensor, width: int) -> Tensor:
    """Points [S, m] in a random orientation and place of ``width`` dimensions."""
    axes = torch.linalg.qr(torch.randn(width, width, dtype=torch.float64)).Q
    return y.double() @ axes[: y.shape[1]] + torch.randn(width, dtype=torch.float64)


def ball(tokens: int, dims: int) -> Tensor:
    """Uniform in the unit ball."""
    v = torch.nn.functional.normalize(torch.randn(tokens, dims, dtype=torch.float64), dim=1)
    return v * torch.rand(tokens, 1, dtype=torch.float64) ** (1 / dims)


def cap(v: Tensor, radius: float) -> Tensor:
    """Tangent vectors [S, m] laid on a sphere of that radius in m + 1 dimensions, lengths kept along its great circles."""
    length = v.norm(dim=1, keepdim=True)
    angle = length / radius
    return torch.cat([radius * angle.sin() * v / length, radius * (1 - angle.cos())], dim=1)


def roll(s: Tensor, height: Tensor, radius: float) -> Tensor:
    """A swiss roll: a sheet rolled to a spiral r = R (1 + 0.15 θ), s its length along the spiral from θ = 0."""
    theta = torch.linspace(-5, 20, 20001, dtype=torch.float64)
    r = radius * (1 + 0.15 * theta)
    arc = torch.cumulative_trapezoid((r.square() + (0.15 * radius) ** 2).sqrt(), theta)
    arc = torch.cat([arc.new_zeros(1), arc]) - arc[5 * 20000 // 25]
    at = torch.searchsorted(arc, s.contiguous()).clamp(1, len(theta) - 1)
    part = (s - arc[at - 1]) / (arc[at] - arc[at - 1])
    angle = theta[at - 1] + part * (theta[at] - theta[at - 1])
    r = radius * (1 + 0.15 * angle)
    return torch.stack([r * angle.cos(), r * angle.sin(), height], dim=1)


def curvature_by_definition(points: Tensor, k: int) -> tuple[float, int]:
    """(Σ κ_i, tokens in it) of a cloud [S, d], through the eigenvectors of each Gram matrix."""
    points = points.double()
    tokens: list[Tensor] = []
    for p in points:
        if torch.isfinite(p).all() and not any(torch.equal(p, other) for other in tokens):
            tokens.append(p)
    total, count = 0.0, 0
    for i, z in enumerate(tokens):
        others = [other - z for j, other in enumerate(tokens) if j != i]
        if len(others) < k:
            continue
        offsets = torch.stack(sorted(others, key=lambda offset: float(offset.norm()))[:k])
        values, vectors = torch.linalg.eigh(offsets @ offsets.T / offsets.square().sum())
        weights = vectors @ ((1 - values) ** 32 * (vectors.T @ torch.ones(k, dtype=torch.float64)))
        weights = weights / weights.sum() if weights.sum() > 1e-4 * k else torch.full_like(weights, 1 / k)
        kappa = float((weights @ offsets).norm() / (offsets.square().sum() / k).sqrt())
        total, count = total + min(kappa, 1.0), count + 1
    return total, count
