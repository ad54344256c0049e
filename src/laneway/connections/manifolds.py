"""Where H_res lives: each manifold turns logits into the matrices that mix the streams.

    sinkhorn     doubly stochastic by Sinkhorn-Knopp (arXiv 2512.24880): n² logits; rows exact, columns converge
    birkhoff     a mixture of all n! permutations (mHC-lite): exactly doubly stochastic, n! logits
    kronecker    a Kronecker product of small mixtures, one per prime factor of n (KromHC): exact, few logits
    orthogonal   the Cayley transform of a skew matrix: keeps the norm of the streams, n(n−1)/2 logits
    identity     the streams never mix: no logits
    none         HC (arXiv 2409.19606): the logits are the matrix, nothing is constrained

A manifold is a module without parameters: called with logits [N, m] it gives H_res [N, out, in]. ``start`` is the bias at
which H_res is the identity but for an even leak: small for few streams, not so for a mixture of hundreds of permutations.
"""

from __future__ import annotations

import itertools
import math
from functools import reduce

import torch
from torch import Tensor, nn

from laneway.connections import ops
from laneway.core import InputError, choice

LARGEST_MIXTURE = 6  # streams (or a prime factor of them) whose n! permutations are still listed: 720
START = 8.0  # logit of the identity at the start, before the cap: e⁻⁸ of the identity's weight goes to each other choice


class Manifold(nn.Module):
    """One choice of H_res for n streams.

    Args:
        streams: n.
        start: bias [logits] of the start, fp32.
    """

    def __init__(self, streams: int, start: Tensor) -> None:
        super().__init__()
        self.streams, self.logits, self.start = streams, start.shape[0], start

    def extra_repr(self) -> str:
        """What ``print(module)`` shows."""
        return f"streams={self.streams}, logits={self.logits}"


class Sinkhorn(Manifold):
    """Doubly stochastic by Sinkhorn-Knopp: laneway.connections.reference.sinkhorn."""

    def __init__(self, streams: int, iterations: int = 20, eps: float = 0.0) -> None:
        super().__init__(streams, START * torch.eye(streams, dtype=torch.float32).flatten())
        self.iterations, self.eps = iterations, eps

    def forward(self, h: Tensor) -> Tensor:
        """[N, n²] laid out [in, out] → [N, out, in]."""
        return ops.sinkhorn(h, self.streams, self.iterations, self.eps)


class Mixture(Manifold):
    """Σ_p softmax(h)_p P_p over all n! permutations P_p, the identity first, then in lexicographic order."""

    def __init__(self, streams: int) -> None:
        if streams > LARGEST_MIXTURE:
            accepted = f"at most {LARGEST_MIXTURE} (or prime factors of at most {LARGEST_MIXTURE} for kronecker)"
            raise InputError("streams", streams, accepted, f"a mixture of {streams}! permutations is too large: use sinkhorn")
        start = torch.zeros(math.factorial(streams), dtype=torch.float32)
        start[0] = START
        super().__init__(streams, start)
        orders = torch.tensor(list(itertools.permutations(range(streams))))
        self.permutations: Tensor
        self.register_buffer("permutations", torch.eye(streams, dtype=torch.float32)[orders].flatten(1), persistent=False)

    def forward(self, h: Tensor) -> Tensor:
        """[N, n!] → [N, n, n], exactly doubly stochastic."""
        return (h.softmax(-1) @ self.permutations.to(h)).unflatten(-1, (self.streams, self.streams))


class Kronecker(Manifold):
    """U₁ ⊗ U₂ ⊗ …, one mixture per prime factor of n."""

    def __init__(self, streams: int) -> None:
        parts = [Mixture(factor) for factor in factors(streams)]
        super().__init__(streams, torch.cat([part.start for part in parts]))
        self.parts, self.widths = nn.ModuleList(parts), [part.logits for part in parts]

    def forward(self, h: Tensor) -> Tensor:
        """[N, Σ p!] → [N, n, n], exactly doubly stochastic."""
        pieces = h.split(self.widths, dim=-1)
        return reduce(_kron, (part(piece) for part, piece in zip(self.parts, pieces, strict=True)))


class Cayley(Manifold):
    """Q = (I + A)⁻¹ (I − A) with A skew: orthogonal for every A, the identity at A = 0."""

    def __init__(self, streams: int) -> None:
        super().__init__(streams, torch.zeros(streams * (streams - 1) // 2, dtype=torch.float32))

    def forward(self, h: Tensor) -> Tensor:
        """[N, n(n−1)/2] → [N, n, n]."""
        n = self.streams
        rows, columns = torch.triu_indices(n, n, 1, device=h.device)
        tokens = torch.arange(h.shape[0], device=h.device)[:, None]
        a = h.new_zeros(h.shape[0], n, n).index_put((tokens, rows, columns), h)
        a = a - a.transpose(-1, -2)
        eye = torch.eye(n, dtype=h.dtype, device=h.device)
        return torch.linalg.solve(eye + a, eye - a)


class Identity(Manifold):
    """H_res = I."""

    def __init__(self, streams: int) -> None:
        super().__init__(streams, torch.zeros(0, dtype=torch.float32))

    def forward(self, h: Tensor) -> Tensor:
        """[N, 0] → [N, n, n]."""
        return torch.eye(self.streams, dtype=h.dtype, device=h.device).repeat(h.shape[0], 1, 1)


class Unconstrained(Manifold):
    """HC: the logits are the matrix."""

    def __init__(self, streams: int) -> None:
        super().__init__(streams, torch.eye(streams, dtype=torch.float32).flatten())

    def forward(self, h: Tensor) -> Tensor:
        """[N, n²] laid out [in, out] → [N, out, in]."""
        return h.unflatten(-1, (self.streams, self.streams)).transpose(-1, -2)


MANIFOLDS = {
    "sinkhorn": Sinkhorn,
    "birkhoff": Mixture,
    "kronecker": Kronecker,
    "orthogonal": Cayley,
    "identity": Identity,
    "none": Unconstrained,
}


def build(name: str, streams: int, *, iterations: int = 20, eps: float = 0.0) -> Manifold:
    """The manifold ``name`` for ``streams`` streams; ``iterations`` and ``eps`` (DeepSeek-V4's) are of use to sinkhorn alone.

    Raises:
        InputError: an unknown name (the nearest is suggested), or more permutations than can be listed.
    """
    choice("manifold", name, MANIFOLDS)
    return Sinkhorn(streams, iterations, eps) if name == "sinkhorn" else MANIFOLDS[name](streams)


def factors(n: int) -> list[int]:
    """Prime factors of n, smallest first; [1] for 1."""
    found, p = [], 2
    while n > 1:
        while n % p == 0:
            found.append(p)
            n //= p
        p += 1
    return found or [1]


def _kron(a: Tensor, b: Tensor) -> Tensor:
    """Kronecker product of each pair of matrices: [N, p, p], [N, q, q] → [N, pq, pq]."""
    p, q = a.shape[-1], b.shape[-1]
    return (a[:, :, None, :, None] * b[:, None, :, None, :]).reshape(-1, p * q, p * q)
