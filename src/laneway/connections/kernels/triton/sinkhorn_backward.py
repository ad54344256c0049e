"""The derivative of ``sinkhorn.balance``: of the iteration that was run, converged or not.

It needs a and b of every step in reverse order. Registers can't be indexed by a run-time number, and to compute each step again
from the start of its segment would cost five times the steps, so the program writes them to a scratch of its own (2n numbers a
step and token) and reads them back. The scratch is used again for the next block of tokens: its size does not grow with the
token count beyond that of SCRATCH_PROGRAMS programs (launch.py), small enough for the L2 cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from laneway.connections.kernels.triton.sinkhorn import (
    SEGMENT,
    constant,
    exponential,
    first_iteration,
    log_scaled,
    over_inputs,
    over_outputs,
    reciprocal,
    scaled,
)


@triton.jit
def _store_scaling(base_ptr, step, part: tl.constexpr, v, n: tl.constexpr, BLOCK: tl.constexpr):
    for i in tl.static_range(n):
        tl.store(base_ptr + ((step * 2 + part) * n + i) * BLOCK + tl.arange(0, BLOCK), v[i])


@triton.jit
def _load_scaling(base_ptr, step, part: tl.constexpr, n: tl.constexpr, BLOCK: tl.constexpr):
    out = ()
    for i in tl.static_range(n):
        out = out + (tl.load(base_ptr + ((step * 2 + part) * n + i) * BLOCK + tl.arange(0, BLOCK)),)
    return out


@triton.jit
def _load_before(base_ptr, step, first, part: tl.constexpr, n: tl.constexpr, BLOCK: tl.constexpr):
    """As ``_load_scaling``; ones before the first step of a segment."""
    lanes = tl.arange(0, BLOCK)
    out = ()
    for i in tl.static_range(n):
        at = base_ptr + ((step * 2 + part) * n + i) * BLOCK + lanes
        out = out + (tl.load(at, mask=(step >= first) & (lanes >= 0), other=1.0),)
    return out


@triton.jit
def _balance_keeping(log_k, scratch_ptr, iterations, eps, n: tl.constexpr, SMOOTH: tl.constexpr, BLOCK: tl.constexpr):
    """``balance`` from log K on; a and b of step t (from 0) go to row t of the scratch."""
    k = exponential(log_k, n * n)
    a = constant(1.0, log_k[0], n)
    b = constant(1.0, log_k[0], n)
    for segment in range((iterations - 1 + SEGMENT - 1) // SEGMENT):
        log_k = log_scaled(log_k, a, b, n)
        k = exponential(log_k, n * n)
        a = constant(1.0, log_k[0], n)
        b = constant(1.0, log_k[0], n)
        for t in range(segment * SEGMENT, tl.minimum((segment + 1) * SEGMENT, iterations - 1)):
            a = reciprocal(over_outputs(k, b, n), a, eps, n, SMOOTH)
            b = reciprocal(over_inputs(k, a, n), b, eps, n, SMOOTH)
            _store_scaling(scratch_ptr, t, 0, a, n, BLOCK)
            _store_scaling(scratch_ptr, t, 1, b, n, BLOCK)
    return scaled(k, a, b, n)


@triton.jit
def _step_backward(g, ga, gb, k, a, b, a0, b0, eps, n: tl.constexpr, SMOOTH: tl.constexpr):
    """Back through b = 1 / (Kᵀ a + ε/b₀) and then a = 1 / (K b₀ + ε/a₀); g is the gradient of log K so far."""
    sb = ()
    for o in tl.static_range(n):
        sb = sb + (-gb[o] * b[o] * b[o],)
    sa = ()
    for i in tl.static_range(n):
        total = ga[i]
        for o in tl.static_range(n):
            total += k[i * n + o] * sb[o]
        sa = sa + (-total * a[i] * a[i],)
    out = ()
    for i in tl.static_range(n):
        for o in tl.static_range(n):
            out = out + (g[i * n + o] + k[i * n + o] * (a[i] * sb[o] + sa[i] * b0[o]),)
    gb = over_inputs(k, sa, n)
    ga = constant(0.0, a[0], n)
    if SMOOTH:
        for_a = ()
        for_b = ()
        for i in tl.static_range(n):
            for_a = for_a + (-eps * sa[i] / (a0[i] * a0[i]),)
            for_b = for_b + (gb[i] - eps * sb[i] / (b0[i] * b0[i]),)
        ga = for_a
        gb = for_b
    return out, ga, gb


@triton.jit
def _first_backward(g, log_k, q, eps, n: tl.constexpr, SMOOTH: tl.constexpr):
    """Gradient of log K → of the logits, through both normalisations of the first iteration."""
    ones = constant(1.0, g[0], n)
    sums = over_inputs(g, ones, n)
    out = ()
    for i in tl.static_range(n):
        for o in tl.static_range(n):
            rest = g[i * n + o] - tl.exp(log_k[i * n + o]) * sums[o]
            if SMOOTH:
                rest = rest * (q[i * n + o] / (q[i * n + o] + eps))  # d log(q + ε) / d log q
            out = out + (rest,)
    sums = over_outputs(out, ones, n)
    result = ()
    for i in tl.static_range(n):
        for o in tl.static_range(n):
            result = result + (out[i * n + o] - q[i * n + o] * sums[i],)
    return result


@triton.jit
def balance_backward(gm, h, scratch_ptr, iterations, eps, n: tl.constexpr, SMOOTH: tl.constexpr, BLOCK: tl.constexpr):
    """Gradient of the matrix → gradient of the logits, both [in, out]."""
    log_k0, q = first_iteration(h, eps, n, SMOOTH)
    m = _balance_keeping(log_k0, scratch_ptr, iterations, eps, n, SMOOTH, BLOCK)
    tl.debug_barrier()  # the compiler may let another thread of the program read a scaling than wrote it
    g = ()
    for e in tl.static_range(n * n):
        g = g + (gm[e] * m[e],)
    segments = (iterations - 1 + SEGMENT - 1) // SEGMENT
    ones = constant(1.0, h[0], n)
    for back in range(segments):
        first = (segments - 1 - back) * SEGMENT
        log_k = log_k0
        for earlier in range(SEGMENT - 1, first, SEGMENT):
            log_k = log_scaled(
                log_k, _load_scaling(scratch_ptr, earlier, 0, n, BLOCK), _load_scaling(scratch_ptr, earlier, 1, n, BLOCK), n
            )
        k = exponential(log_k, n * n)
        steps = tl.minimum(SEGMENT, iterations - 1 - first)
        a = _load_scaling(scratch_ptr, first + steps - 1, 0, n, BLOCK)
        b = _load_scaling(scratch_ptr, first + steps - 1, 1, n, BLOCK)
        ga = _divide(over_outputs(g, ones, n), a, n)
        gb = _divide(over_inputs(g, ones, n), b, n)
        for t in range(steps):
            before = first + steps - 2 - t
            a0 = _load_before(scratch_ptr, before, first, 0, n, BLOCK)
            b0 = _load_before(scratch_ptr, before, first, 1, n, BLOCK)
            g, ga, gb = _step_backward(g, ga, gb, k, a, b, a0, b0, eps, n, SMOOTH)
            a = a0
            b = b0
    tl.debug_barrier()  # the next block of tokens writes over the scratch
    return _first_backward(g, log_k0, q, eps, n, SMOOTH)


@triton.jit
def _divide(v, by, n: tl.constexpr):
    out = ()
    for i in tl.static_range(n):
        out = out + (v[i] / by[i],)
    return out
