"""Sinkhorn-Knopp over many small matrices, structure of arrays: [in, out, tokens], so that every operation is a long vector.

One full iteration is done on the logits themselves (two softmaxes), which leaves a matrix K whose every row and every
column has an entry ≥ 1/n², whatever the logits were. From there on only scaling vectors change, M = diag(a) K diag(b):

    a ← 1 / (K b + ε/a)      outputs of each input sum to one    (T_c: columns of H_res)
    b ← 1 / (Kᵀ a + ε/b)     inputs of each output sum to one    (T_r: rows of H_res, always last)

so an iteration costs two products with K and no exponential. One step changes a scaling by at most a factor n; after
``SEGMENT`` iterations (fewer for many streams) the scalings go into log K and start from one again. That keeps n^SEGMENT, the
most they can reach, and its square inside fp32, and revives entries of K that were too small for fp32 before the scalings had
grown. The backward pass runs the same steps again, keeps their a and b, and walks them in reverse: the exact derivative of the
iteration that was run, converged or not, with nothing kept between forward and backward.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

CHUNK = 2048  # tokens at a time: keeps K in the cache, and bounds what the backward holds
SEGMENT = 10  # at most so many iterations between two restarts of the scalings
DIGITS = 36  # decimal digits that the square of a scaling may have in fp32


def forward(logits: Tensor, n: int, iterations: int, eps: float) -> Tensor:
    """Logits [N, n·n] laid out [in, out] → H_res [N, out, in]."""
    h_res = torch.empty(logits.shape[0], n, n, dtype=logits.dtype, device=logits.device)
    for start in range(0, logits.shape[0], CHUNK):
        part = logits[start : start + CHUNK]
        log_k, _ = _first_iteration(_to_arrays(part, n), eps)
        m = log_k.exp() if iterations == 1 else _scale(*_run(log_k, iterations, eps)[-1])
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
    """(log K, P): P the softmax over outputs (+ ε), K that with inputs normalised too."""
    if eps == 0.0:
        log_p = torch.log_softmax(logits, 1)
        return torch.log_softmax(log_p, 0), log_p.exp_()
    p = torch.softmax(logits, 1).add_(eps)
    return p.log().sub_((p.sum(0) + eps).log_()), p


def _run(log_k: Tensor, iterations: int, eps: float) -> list[tuple[Tensor, Tensor, Tensor]]:
    """The iterations after the first as segments (K, a, b): a and b after each step."""
    segments = []
    n = log_k.shape[0]
    segment = max(1, min(SEGMENT, int(DIGITS / (2 * math.log10(max(n, 2))))))
    for done in range(1, iterations, segment):
        k = log_k.exp()
        a, b = _scalings(k, min(segment, iterations - done), eps)
        segments.append((k, a, b))
        log_k = log_k + a[-1].log().unsqueeze(1) + b[-1].log()
    return segments


def _scale(k: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """diag(a) K diag(b) with the last a and b."""
    return k * a[-1].unsqueeze(1) * b[-1]


def _scalings(k: Tensor, steps: int, eps: float) -> tuple[Tensor, Tensor]:
    """The scaling vectors a and b after 0 … ``steps`` iterations, each [steps + 1, n, N]; they start from ones."""
    n, _, tokens = k.shape
    a, b = k.new_empty(steps + 1, n, tokens), k.new_empty(steps + 1, n, tokens)
    a[0] = b[0] = 1.0
    of_input, of_output = a.unsqueeze(2).unbind(0), b.unbind(0)  # views made once: on small matrices indexing is what costs
    sums, work = a.unbind(0), torch.empty_like(k)
    for t in range(1, steps + 1):
        _divide(torch.sum(torch.mul(k, of_output[t - 1], out=work), 1, out=sums[t]), sums[t - 1], eps)
        _divide(torch.sum(torch.mul(k, of_input[t], out=work), 0, out=of_output[t]), of_output[t - 1], eps)
    return a, b


def _divide(sums: Tensor, previous: Tensor, eps: float) -> None:
    """In place: 1 / (sums + ε / previous)."""
    if eps != 0.0:
        sums.addcdiv_(_one(sums), previous, value=eps)
    sums.reciprocal_()


def _one(like: Tensor) -> Tensor:
    return torch.ones((), dtype=like.dtype, device=like.device)


def _backward_chunk(g: Tensor, logits: Tensor, iterations: int, eps: float) -> Tensor:
    """Gradient of M → gradient of the logits, segment by segment from the last. From here on gradients are those of logs."""
    log_k, p = _first_iteration(logits, eps)
    segments = _run(log_k, iterations, eps)
    g = g * (_scale(*segments[-1]) if segments else log_k.exp())
    for k, a, b in reversed(segments):
        g = _backward_segment(g, k, a, b, eps)
    return _backward_first(g, segments[0][0] if segments else log_k.exp(), p, eps)


def _backward_segment(g: Tensor, k: Tensor, a: Tensor, b: Tensor, eps: float) -> Tensor:
    """Gradient of log(diag(a) K diag(b)) → gradient of log K. ga, gb, gk: those of a, b and K; sa, sb: of their sums."""
    slope_a, slope_b = ((-v * v).unbind(0) for v in (a, b))  # derivative of a reciprocal by its sum
    carry_a, carry_b = ((-eps / (v * v)).unbind(0) if eps != 0.0 else () for v in (a, b))  # of ε / previous
    of_input, of_output = a.unsqueeze(2).unbind(0), b.unbind(0)
    ga, gb = g.sum(1) / a[-1], g.sum(0) / b[-1]
    gk, work = torch.zeros_like(k), torch.empty_like(k)
    sa, sb = torch.zeros_like(gb), torch.empty_like(gb)
    sa_input, last = sa.unsqueeze(1), a.shape[0] - 1
    for t in range(last, 0, -1):
        torch.mul(gb, slope_b[t], out=sb)  # b_t = 1 / (Kᵀ a_t + ε/b_{t-1})
        gk.addcmul_(of_input[t], sb)
        torch.mul(k, sb, out=work)
        if t == last:
            ga += torch.sum(work, 1)
        else:
            torch.sum(work, 1, out=ga)
            if eps != 0.0:
                ga.addcmul_(sa, carry_a[t])
        torch.mul(ga, slope_a[t], out=sa)  # a_t = 1 / (K b_{t-1} + ε/a_{t-1})
        gk.addcmul_(sa_input, of_output[t - 1])
        torch.sum(torch.mul(k, sa_input, out=work), 0, out=gb)
        if eps != 0.0:
            gb.addcmul_(sb, carry_b[t - 1])
    return gk.mul_(k).add_(g)


def _backward_first(g: Tensor, k: Tensor, p: Tensor, eps: float) -> Tensor:
    """Through the first iteration: gradient of log K → of log P → of the logits."""
    if eps == 0.0:
        g = g - k * g.sum(0)
        return g.sub_(p * g.sum(1, keepdim=True))
    g = g - p / (p.sum(0) + eps) * g.sum(0)
    share = (p - eps) / p  # d log(q + ε) / d log q
    g = g * share
    return g - (p - eps) * g.sum(1, keepdim=True)
