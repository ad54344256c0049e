"""Sinkhorn-Knopp with one token a lane: every entry of the n × n matrix is a vector over tokens, held in registers.

A matrix is a tuple of n² such vectors, entry [in i, out o] at i·n + o; a scaling is a tuple of n. No shuffle, no shared memory,
no padding of n. The method is that of ``kernels/sinkhorn.py``: the first iteration in the log domain, then only the scalings
of M = diag(a) K diag(b) change,

    a ← 1 / (K b + ε/a)      outputs of each input sum to one    (T_c: columns of H_res)
    b ← 1 / (Kᵀ a + ε/b)     inputs of each output sum to one    (T_r: rows of H_res, always last)

and every SEGMENT iterations they go into log K and start from one again, which keeps them inside fp32 for any logits.
"""

from __future__ import annotations

import triton
import triton.language as tl

SEGMENT = tl.constexpr(10)  # 8¹⁰ and its square are well inside fp32


@triton.jit
def constant(value: tl.constexpr, like, count: tl.constexpr):
    """``count`` vectors of one value."""
    out = ()
    for _ in tl.static_range(count):
        out = out + (tl.full(like.shape, value, tl.float32),)
    return out


@triton.jit
def exponential(log_k, count: tl.constexpr):
    """K."""
    out = ()
    for e in tl.static_range(count):
        out = out + (tl.exp(log_k[e]),)
    return out


@triton.jit
def over_outputs(k, b, n: tl.constexpr):
    """K b: for each input the sum over outputs."""
    out = ()
    for i in tl.static_range(n):
        total = k[i * n] * b[0]
        for o in tl.static_range(1, n):
            total += k[i * n + o] * b[o]
        out = out + (total,)
    return out


@triton.jit
def over_inputs(k, a, n: tl.constexpr):
    """Kᵀ a: for each output the sum over inputs."""
    out = ()
    for o in tl.static_range(n):
        total = k[o] * a[0]
        for i in tl.static_range(1, n):
            total += k[i * n + o] * a[i]
        out = out + (total,)
    return out


@triton.jit
def reciprocal(sums, previous, eps, n: tl.constexpr, SMOOTH: tl.constexpr):
    """1 / (sums + ε / previous)."""
    out = ()
    for i in tl.static_range(n):
        if SMOOTH:
            out = out + (1.0 / (sums[i] + eps / previous[i]),)
        else:
            out = out + (1.0 / sums[i],)
    return out


@triton.jit
def log_scaled(log_k, a, b, n: tl.constexpr):
    """log(diag(a) K diag(b))."""
    out = ()
    for i in tl.static_range(n):
        for o in tl.static_range(n):
            out = out + (log_k[i * n + o] + tl.log(a[i]) + tl.log(b[o]),)
    return out


@triton.jit
def scaled(k, a, b, n: tl.constexpr):
    """diag(a) K diag(b)."""
    out = ()
    for i in tl.static_range(n):
        for o in tl.static_range(n):
            out = out + (k[i * n + o] * a[i] * b[o],)
    return out


@triton.jit
def _softmax(h, n: tl.constexpr):
    """Over outputs, (log q, q)."""
    logs = ()
    out = ()
    for i in tl.static_range(n):
        top = h[i * n]
        for o in tl.static_range(1, n):
            top = tl.maximum(top, h[i * n + o])
        total = tl.exp(h[i * n] - top)
        for o in tl.static_range(1, n):
            total += tl.exp(h[i * n + o] - top)
        log_total = tl.log(total)
        for o in tl.static_range(n):
            logs = logs + (h[i * n + o] - top - log_total,)
            out = out + (tl.exp(h[i * n + o] - top) / total,)
    return logs, out


@triton.jit
def first_iteration(h, eps, n: tl.constexpr, SMOOTH: tl.constexpr):
    """(log K, q): q the softmax over outputs, K = q (+ ε) with inputs normalised too."""
    log_p, q = _softmax(h, n)
    if SMOOTH:
        log_p = ()
        for e in tl.static_range(n * n):
            log_p = log_p + (tl.log(q[e] + eps),)
    shift = ()
    for o in tl.static_range(n):
        top = log_p[o]
        for i in tl.static_range(1, n):
            top = tl.maximum(top, log_p[i * n + o])
        total = tl.exp(log_p[o] - top)
        for i in tl.static_range(1, n):
            total += tl.exp(log_p[i * n + o] - top)
        if SMOOTH:
            total += eps * tl.exp(-top)
        shift = shift + (top + tl.log(total),)
    log_k = ()
    for i in tl.static_range(n):
        for o in tl.static_range(n):
            log_k = log_k + (log_p[i * n + o] - shift[o],)
    return log_k, q


@triton.jit
def balance(h, iterations, eps, n: tl.constexpr, SMOOTH: tl.constexpr):
    """Logits → the doubly stochastic matrix, both [in, out]."""
    log_k, _ = first_iteration(h, eps, n, SMOOTH)
    k = exponential(log_k, n * n)
    a = constant(1.0, h[0], n)
    b = constant(1.0, h[0], n)
    for segment in range((iterations - 1 + SEGMENT - 1) // SEGMENT):
        log_k = log_scaled(log_k, a, b, n)
        k = exponential(log_k, n * n)
        a = constant(1.0, h[0], n)
        b = constant(1.0, h[0], n)
        for _step in range(tl.minimum(SEGMENT, iterations - 1 - segment * SEGMENT)):
            a = reciprocal(over_outputs(k, b, n), a, eps, n, SMOOTH)
            b = reciprocal(over_inputs(k, a, n), b, eps, n, SMOOTH)
    return scaled(k, a, b, n)
