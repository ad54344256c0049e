"""Arbitration: streams that say the same thing, and how much of what is written to them is held back.

The subspace of a stream is spanned by the r leading principal directions of its tokens, in a seeded random projection to d
dimensions. Of two streams, with θ the principal angles between their subspaces U_i and U_j [d, r] (Björck and Golub, Math. Comp.
27, 1973) and u their use:

    similarity    S_ij = mean cos² θ = |U_iᵀ U_j|² / r                    1: the same subspace; r / d or so: unrelated ones
    collision     O_ij = max(0, S_ij − threshold) / (1 − threshold)
    who yields    y_ij = 2 u_j / (u_i + u_j)                              the stream that is used less; 1 for equal ones
    gate          g_i = 1 / (1 + η Σ_{j≠i} O_ij y_ij / (n − 1))           in [1 / (1 + 2η), 1]

All in fp32 (float64 for float64 samples). A token that is not finite is left out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from laneway.core import InputError, positive_int

RANK = 1e-5  # smallest variance of a direction that counts, relative to the largest


def check_directions(field: str, directions: int, dims: int) -> None:
    """Raise InputError unless subspaces of that many directions can differ in ``dims`` dimensions."""
    if positive_int(field, directions) >= dims:
        raise InputError(field, directions, f"an integer from 1 to below the {dims} dimensions of the features")


def principal_directions(points: Tensor, directions: int) -> tuple[Tensor, Tensor]:
    """Samples [B, S, d] → (orthonormal [B, d, r], whether the sample has that many directions [B]).

    Raises:
        InputError: r ≥ d.
    """
    check_directions("directions", directions, points.shape[-1])
    z = points if points.dtype == torch.float64 else points.float()
    valid = z.isfinite().all(-1, keepdim=True)
    z = _in_range(torch.where(valid, z, 0))
    count = valid.sum(1, keepdim=True).clamp(min=1)
    z = _in_range(torch.where(valid, z - z.sum(1, keepdim=True) / count, 0))
    values, vectors = torch.linalg.eigh(z.mT @ z)  # ascending
    enough = (values[:, -directions] > RANK * values[:, -1]) & (count[:, 0, 0] > directions)
    return vectors[..., -directions:], enough


def _in_range(z: Tensor) -> Tensor:
    """Samples [B, S, d], each over its largest magnitude, so that neither sums nor squares overflow."""
    largest = z.abs().amax((1, 2), keepdim=True)
    return z / torch.where(largest > 0, largest, 1)


def subspace_similarity(points: Tensor, directions: int) -> tuple[Tensor, Tensor]:
    """Samples [sites, n, S, d] → (S [sites, n, n], which pairs could be compared). What could not is 0.

    Raises:
        InputError: r ≥ d.
    """
    sites, n = points.shape[:2]
    with torch.no_grad(), torch.autocast(points.device.type, enabled=False):
        basis, enough = principal_directions(points.flatten(0, 1), directions)
        basis, enough = basis.unflatten(0, (sites, n)), enough.view(sites, n)
        cosines = torch.einsum("sidp,sjdq->sijpq", basis, basis)
        similarity = cosines.square().sum((-1, -2)).div(directions).clamp(max=1)
        both = enough[:, :, None] & enough[:, None, :]
        return torch.where(both, similarity, 0), both


def damping_gate(similarity: Tensor, log_use: Tensor, threshold: float, damping: float) -> Tensor:
    """S [sites, n, n] and log use [sites, n] → g [sites, n]; 1 exactly where nothing collides."""
    n = similarity.shape[-1]
    others = 1 - torch.eye(n, dtype=similarity.dtype, device=similarity.device)
    collision = (similarity - threshold).clamp(min=0) / (1 - threshold) * others
    yields = 2 * (log_use[:, None, :] - log_use[:, :, None]).sigmoid()
    return 1 / (1 + damping * (collision * yields).sum(-1) / max(n - 1, 1))
