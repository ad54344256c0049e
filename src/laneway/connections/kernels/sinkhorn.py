"""Sinkhorn-Knopp over many small matrices, structure of arrays: [in, out, tokens], so that every operation is a long vector.

One full iteration is done on the logits themselves (two log-sum-exps), which leaves a matrix K whose every row and every
column has an entry ≥ 1/n², whatever the logits were. From there on only scaling vectors change, M = diag(a) K diag(b):

    a ← 1 / (K b + ε/a)      outputs of each input sum to one    (T_c: columns of H_res)
    b ← 1 / (Kᵀ a + ε/b)     inputs of each output sum to one    (T_r: rows of H_res, always last)

so an iteration costs two products with K and no exponential. A scaling step changes a or b by at most a factor n, which
keeps them inside fp32. The backward pass runs the same steps again, keeps their a and b, and walks them in reverse: the
exact derivative of the iteration that was run, converged or not, with nothing kept between forward and backward.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 16384  # tokens at a time: bounds the backward's history to 2·n·iterations·CHUNK numbers


def forward(logits: Tensor, n: int, iterations: int, eps: float) -> Tensor:
    """Logits [N, n·n] laid out [in, out] → H_res [N, out, in]."""
    h_res = torch.empty(logits.shape[0], n, n, dtype=logits.dtype, device=logits.device)
    for start in range(0, logits.shape[0], CHUNK):
        part = logits[start : start + CHUNK]
        k, _ = _first_iteration(_to_arrays(part, n), eps)
        a, b = _scalings(k, iterations, eps)
        m = k.mul_(a[-1].unsqueeze(1)).mul_(b[-1])
        h_res[start : start + CHUNK] = m.permute(2, 1, 0)
    return h_res


def backward(grad: Tensor, logits: Tensor, n: int, iterations: int, eps: float) -> Tensor:
    """Gradient [N, out, in] of H_res → gradient [N, n·n] of the logits."""
    result = torch.empty_like(logits, memory_format=torch.contiguous_format)
    for start in range(0, logits.shape[0], CHUNK):
        part = logits[start : start + CHUNK]
        g = grad[start : start + CHUNK].permute(2, 1, 0).contiguous()
        result[start : start + CHUNK] = _backward_chunk(g, _to_arrays(part, n), iterations, eps).flatten(0, 1).t()
    return result


def _to_arrays(logits: Tensor, n: int) -> Tensor:
    return logits.t().contiguous().view(n, n, -1)


def _first_iteration(logits: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(K, P): P the softmax over outputs (+ ε), K that with inputs normalised too."""
    if eps == 0.0:
        log_p = torch.log_softmax(logits, 1)
        return torch.softmax(log_p, 0), log_p.exp_()
    p = torch.softmax(logits, 1).add_(eps)
    return p / (p.sum(0) + eps), p


def _scalings(k: Tensor, iterations: int, eps: float) -> tuple[Tensor, Tensor]:
    """The scaling vectors a and b of iterations 1 … T, each [T, n, N]; those of iteration 1 are ones."""
    n, _, tokens = k.shape
    a, b = k.new_empty(iterations, n, tokens), k.new_empty(iterations, n, tokens)
    a[0] = b[0] = 1.0
    work = torch.empty_like(k)
    for t in range(1, iterations):
        _divide(torch.sum(torch.mul(k, b[t - 1], out=work), 1, out=a[t]), a[t - 1], eps)
        _divide(torch.sum(torch.mul(k, a[t].unsqueeze(1), out=work), 0, out=b[t]), b[t - 1], eps)
    return a, b


def _divide(sums: Tensor, previous: Tensor, eps: float) -> None:
    """In place: 1 / (sums + ε / previous)."""
    if eps != 0.0:
        sums.add_(previous.reciprocal(), alpha=eps)
    sums.reciprocal_()


def _backward_chunk(g: Tensor, logits: Tensor, iterations: int, eps: float) -> Tensor:
    """Reverse of the steps above. ga, gb, gk: gradients of a, b and K."""
    k, p = _first_iteration(logits, eps)
    a, b = _scalings(k, iterations, eps)
    work = g * k
    ga = torch.mul(work, b[-1]).sum(1)
    gb = torch.mul(work, a[-1].unsqueeze(1)).sum(0)
    gk = g * a[-1].unsqueeze(1) * b[-1]
    for t in range(iterations - 1, 0, -1):
        # b_t = 1 / (Kᵀ a_t + ε/b_{t-1})
        s = -gb * b[t] * b[t]
        gk.addcmul_(a[t].unsqueeze(1), s)
        ga += torch.mul(k, s, out=work).sum(1)
        gb = s * (-eps) / (b[t - 1] * b[t - 1]) if eps != 0.0 else None
        # a_t = 1 / (K b_{t-1} + ε/a_{t-1})
        s = -ga * a[t] * a[t]
        gk.addcmul_(s.unsqueeze(1), b[t - 1])
        from_a = torch.mul(k, s.unsqueeze(1), out=work).sum(0)
        gb = from_a if gb is None else gb.add_(from_a)
        ga = s * (-eps) / (a[t - 1] * a[t - 1]) if eps != 0.0 else torch.zeros_like(ga)
    return _backward_first(gk, k, p, eps)


def _backward_first(gk: Tensor, k: Tensor, p: Tensor, eps: float) -> Tensor:
    """Through the first iteration: K from P from the logits."""
    if eps == 0.0:  # two softmaxes, on log P and on the logits
        g_log_p = gk.mul_(k).sub_(k * gk.sum(0))
        return g_log_p.sub_(p * g_log_p.sum(1, keepdim=True))
    gp = (gk - (gk * k).sum(0)) / (p.sum(0) + eps)
    q = p - eps
    return q * (gp - (gp * q).sum(1, keepdim=True))
