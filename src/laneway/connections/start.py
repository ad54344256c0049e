"""How a network of sites begins: equal to the plain residual network, with every map alive. Derivation: docs/start.md.

At step 0 the maps are constants: stream i holds x_i = X + d_i, where X is what the plain network would hold. With H_res = M
doubly stochastic the network stays equal to the plain one if and only if

    every read sums to one and cannot see d:     Σ_j pre_j = 1,   pre ⟂ d
    every write adds the plain branch on average: Σ_i post_i = n,  read-out likewise.

d is spanned by one direction q (what writes put in), so reads and read-out must be orthogonal to q: with q = 0 all streams
are equal and H_res, whose rows sum to one, has **no gradient at all**; with every read alike, none either on an exactly doubly
stochastic manifold. The embedding enters as 1 − q, so that streams differ in direction and H_pre lives as well. q and the
reads need two different directions orthogonal to (1, …, 1): that takes n ≥ 3. For n = 2 there is only one, the reads get it,
and H_res wakes up after the first update.
"""

from __future__ import annotations

import torch
from torch import Tensor

from laneway.connections.manifolds import factors

LEAK = 0.01  # weight that a read gives to each stream it does not lean on
WRITE = 0.25  # relative strength of the difference between writes: 1.25, 0.75
READ_OUT = 0.5  # relative strength of the read-out's lean


def groups(n: int) -> tuple[range, range, range]:
    """Streams written more strongly, more weakly, and neutrally. M must map their difference to a multiple of itself.

    The first two have (f // 2)·(n / f) streams, f the smallest prime factor of n, which also suits Kronecker products.
    """
    f = factors(n)[0]
    half = (f // 2) * (n // f)
    return range(half), range(half, 2 * half), range(2 * half, n)


def write_direction(n: int) -> Tensor:
    """q [n], entries in {WRITE, −WRITE, 0}; zero for n < 3."""
    q = torch.zeros(n, dtype=torch.float32)
    if n >= 3:
        strong, weak, _ = groups(n)
        q[strong.start : strong.stop], q[weak.start : weak.stop] = WRITE, -WRITE
    return q


def read_weights(n: int, site: int) -> Tensor:
    """H_pre at the start [n]: sums to one, orthogonal to q, leaning on other streams at each site."""
    if n <= 2:
        favoured = [site % n]
    else:
        strong, weak, neutral = groups(n)
        turn, half = site, len(strong)
        if len(neutral) and site % 2:
            favoured = [neutral[site // 2 % len(neutral)]]
        else:
            turn = site // 2 if len(neutral) else site
            favoured = [strong[turn % half], weak[(turn + turn // half) % half]]
    weights = torch.full((n,), LEAK, dtype=torch.float32)
    weights[favoured] = (1 - LEAK * (n - len(favoured))) / len(favoured)
    return weights


def write_weights(n: int) -> Tensor:
    """H_post at the start [n]: 1 + q."""
    return 1 + write_direction(n)


def readout_weights(n: int) -> Tensor:
    """Weights of the learned read-out at the start [n]: sum to one, orthogonal to q, not uniform."""
    p = torch.zeros(n, dtype=torch.float32)
    if n >= 2:
        strong, weak, neutral = groups(n)
        if n == 2:
            p[0], p[1] = 1.0, -1.0
        elif len(strong) == 1:
            p[neutral.start :] = -2.0 / len(neutral)
            p[strong[0]] = p[weak[0]] = 1.0
            p *= 0.5
        else:
            p[[strong[0], weak[0]]], p[[strong[1], weak[1]]] = 1.0, -1.0
    return (1 + READ_OUT * p) / n


def logit(p: Tensor) -> Tensor:
    """Inverse of the sigmoid, in float64 so that the fp32 map comes back to rounding."""
    return torch.logit(p.double()).float()
