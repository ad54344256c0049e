"""Where H_res lives: each manifold turns logits into the matrices that mix the streams.

    sinkhorn     doubly stochastic by Sinkhorn-Knopp (arXiv 2512.24880): n² logits; rows exact, columns converge
    birkhoff     a mixture of all n! permutations (mHC-lite): exactly doubly stochastic, n! logits
    kronecker    a Kronecker product of small mixtures, one per prime factor of n (KromHC): exact, few logits
    orthogonal   the Cayley transform of a skew matrix: keeps the norm of the streams, n(n−1)/2 logits
    identity     the streams never mix: no logits
    none         HC (arXiv 2409.19606): the logits are the matrix, nothing is constrained

``matrix`` maps logits [N, m] to H_res [N, out, in]; ``start`` is the bias at which H_res is (close to) the identity.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, reduce

import torch
from torch import Tensor

from laneway.connections import ops
from laneway.core import InputError, choice

LARGEST_MIXTURE = 6  # streams (or a prime factor of them) whose n! permutations are still listed: 720
START = 8.0  # logit of the identity at the start: e⁻⁸ of every stream leaks to each other one


@dataclass(frozen=True)
class Manifold:
    """One choice of H_res."""

    name: str
    streams: int
    logits: int
    """How many logits one matrix takes."""
    start: Tensor
    """Bias [logits] of the start, fp32."""
    matrix: Callable[[Tensor], Tensor]
    """Logits [N, logits] → H_res [N, out, in]."""


def build(name: str, streams: int, *, iterations: int = 20, eps: float = 0.0) -> Manifold:
    """The manifold ``name`` for ``streams`` streams.

    Args:
        name: one of sinkhorn, birkhoff, kronecker, orthogonal, identity, none.
        streams: n ≥ 1.
        iterations: Sinkhorn iterations, ≥ 1; of use to ``sinkhorn`` alone.
        eps: DeepSeek-V4's eps inside Sinkhorn; of use to ``sinkhorn`` alone.

    Raises:
        InputError: an unknown name (the nearest is suggested), or more permutations than can be listed.
    """
    choice("manifold", name, MANIFOLDS)
    n, identity = streams, torch.eye(streams)
    if name == "sinkhorn":
        return Manifold(name, n, n * n, START * identity.flatten(), lambda h: ops.sinkhorn(h, n, iterations, eps))
    if name == "birkhoff":
        return Manifold(name, n, *_mixture(n))
    if name == "kronecker":
        return _kronecker(n)
    if name == "orthogonal":
        pairs = n * (n - 1) // 2
        return Manifold(name, n, pairs, torch.zeros(pairs), lambda h: cayley(h, n))
    if name == "identity":
        return Manifold(name, n, 0, torch.zeros(0), lambda h: torch.eye(n, dtype=h.dtype, device=h.device).expand(len(h), n, n))
    return Manifold(name, n, n * n, identity.flatten(), lambda h: h.unflatten(-1, (n, n)).transpose(-1, -2))


MANIFOLDS = ("sinkhorn", "birkhoff", "kronecker", "orthogonal", "identity", "none")


def factors(n: int) -> list[int]:
    """Prime factors of n, smallest first; [1] for 1."""
    found, p = [], 2
    while n > 1:
        while n % p == 0:
            found.append(p)
            n //= p
        p += 1
    return found or [1]


@cache
def permutations(n: int) -> Tensor:
    """All n! permutation matrices [n!, n, n], the identity first, in lexicographic order."""
    return torch.eye(n)[torch.tensor(list(itertools.permutations(range(n))))]


def _mixture(n: int) -> tuple[int, Tensor, Callable[[Tensor], Tensor]]:
    """Logits, start and map of a softmax mixture of all permutations of n streams."""
    if n > LARGEST_MIXTURE:
        accepted = f"at most {LARGEST_MIXTURE} (or prime factors of at most {LARGEST_MIXTURE} for kronecker)"
        raise InputError("streams", n, accepted, f"a mixture of {n}! permutations is too large: use sinkhorn")
    start = torch.zeros(math.factorial(n))
    start[0] = START

    def matrix(h: Tensor) -> Tensor:
        weights = h.softmax(-1)
        return (weights @ permutations(n).flatten(1).to(h)).unflatten(-1, (n, n))

    return len(start), start, matrix


def _kronecker(n: int) -> Manifold:
    """U₁ ⊗ U₂ ⊗ …, one mixture per prime factor of n."""
    parts = [_mixture(p) for p in factors(n)]

    def matrix(h: Tensor) -> Tensor:
        pieces = h.split([count for count, _, _ in parts], dim=-1)
        return reduce(_kron, (part[2](piece) for part, piece in zip(parts, pieces, strict=True)))

    start = torch.cat([part[1] for part in parts])
    return Manifold("kronecker", n, len(start), start, matrix)


def _kron(a: Tensor, b: Tensor) -> Tensor:
    """Kronecker product of each pair of matrices: [N, p, p], [N, q, q] → [N, pq, pq]."""
    p, q = a.shape[-1], b.shape[-1]
    return (a[:, :, None, :, None] * b[:, None, :, None, :]).reshape(-1, p * q, p * q)


def cayley(h: Tensor, n: int) -> Tensor:
    """Q = (I + A)⁻¹ (I − A) with A skew: orthogonal for every A, the identity at A = 0. h [N, n(n−1)/2] → [N, n, n]."""
    rows, columns = torch.triu_indices(n, n, 1, device=h.device)
    a = h.new_zeros(len(h), n, n).index_put((slice_all(h), rows, columns), h)
    a = a - a.transpose(-1, -2)
    eye = torch.eye(n, dtype=h.dtype, device=h.device)
    return torch.linalg.solve(eye + a, eye - a)


def slice_all(h: Tensor) -> Tensor:
    """Token index [N, 1] that broadcasts against a list of matrix entries."""
    return torch.arange(len(h), device=h.device)[:, None]
