"""From projections to finished maps and back, one token a lane. Memory touched: some hundred bytes a token, no streams.

    finish            partial sums of the projection → z, r, H_pre, H_post, H_res
    finish_backward   gradients of the maps → what the streams' gradient needs (gz·r and a factor of x), and partial sums of the
                      gradients of base and scale

H_pre and H_post are done on tiles [tokens, 2n]; H_res is taken apart into a vector over tokens for each entry (lanes.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from laneway.connections.kernels.triton.lanes import pack, unpack
from laneway.connections.kernels.triton.sinkhorn import balance
from laneway.connections.kernels.triton.sinkhorn_backward import balance_backward


@triton.jit
def _sigmoid(v):
    """By exp of what is never positive, so that no logit overflows."""
    e = tl.exp(-tl.abs(v))
    return tl.where(v < 0.0, e, 1.0) / (1.0 + e)


@triton.jit
def _tanh(v):
    """By exp away from zero and by its series near it: plain Triton has no tanh, and the former loses digits there."""
    e = tl.exp(-2.0 * tl.abs(v))
    far = (1.0 - e) / (1.0 + e)
    s = v * v
    near = v * (1.0 + s * (-1.0 / 3 + s * (2.0 / 15 + s * (-17.0 / 315 + s * (62.0 / 2835)))))
    return tl.where(s < 0.0625, near, tl.where(v < 0, -far, far))


@triton.jit
def _tanh_slope(v):
    """1 − tanh², without the cancellation where tanh is near one."""
    e = tl.exp(-2.0 * tl.abs(v))
    return 4.0 * e / ((1.0 + e) * (1.0 + e))


@triton.jit
def _capped(h, cap, CAPPED: tl.constexpr):
    if CAPPED:
        h = cap * _tanh(h / cap)
    return h


@triton.jit
def _columns(n: tl.constexpr, PA: tl.constexpr, PR: tl.constexpr):
    """Columns of pre and post; of res [in, out]; of the same entries in a matrix [out, in]; and which of them exist."""
    a = tl.arange(0, PA)
    r = tl.arange(0, PR)
    return a, a < 2 * n, 2 * n + r, 2 * n + (r % n) * n + r // n, r < n * n


@triton.jit(do_not_specialize=["N", "iterations", "spans"])
def finish(
    part_ptr, base_ptr, scale_ptr, z_ptr, r_ptr, maps_ptr, N, K, spans, iterations, norm_eps, eps, cap,
    n: tl.constexpr, PA: tl.constexpr, PR: tl.constexpr, SMOOTH: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """part [spans, N, m + 1] (x φᵀ, then Σ x²), base [m], scale [3] → z [N, m], r [N], maps [N, m]."""
    m: tl.constexpr = n * (n + 2)
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = token < N
    a, has_a, e, transposed, has_e = _columns(n, PA, PR)
    mask_a = valid[:, None] & has_a[None, :]
    mask_e = valid[:, None] & has_e[None, :]
    za = tl.zeros([BLOCK, PA], tl.float32)
    ze = tl.zeros([BLOCK, PR], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    for s in range(spans):
        row = (tl.cast(N, tl.int64) * s + token) * (m + 1)
        za += tl.load(part_ptr + row[:, None] + a[None, :], mask=mask_a, other=0.0)
        ze += tl.load(part_ptr + row[:, None] + e[None, :], mask=mask_e, other=0.0)
        squares += tl.load(part_ptr + row + m, mask=valid, other=0.0)
    r = 1.0 / tl.sqrt(squares / K + norm_eps)
    tl.store(r_ptr + token, r, mask=valid)
    za *= r[:, None]
    ze *= r[:, None]
    row = token * m
    tl.store(z_ptr + row[:, None] + a[None, :], za, mask=mask_a)
    tl.store(z_ptr + row[:, None] + e[None, :], ze, mask=mask_e)
    gate = _sigmoid(_logits(za, a, has_a, base_ptr, scale_ptr + a // n))
    tl.store(maps_ptr + row[:, None] + a[None, :], tl.where((a < n)[None, :], gate + eps, 2.0 * gate), mask=mask_a)
    h = _capped(_logits(ze, e, has_e, base_ptr, scale_ptr + 2 + 0 * e), cap, CAPPED)
    res = balance(unpack(h, PR), iterations, eps, n, SMOOTH)
    tl.store(maps_ptr + row[:, None] + transposed[None, :], pack(res, n * n, PR), mask=mask_e)


@triton.jit
def _logits(z, column, exists, base_ptr, scales):
    """scale ⊙ z + base for these columns."""
    scale = tl.load(scales, mask=exists, other=0.0)
    return scale[None, :] * z + tl.load(base_ptr + column, mask=exists, other=0.0)[None, :]


@triton.jit(do_not_specialize=["N", "iterations", "spans", "blocks", "scratch_rows"])
def finish_backward(
    gmaps_ptr, reads_ptr, z_ptr, r_ptr, base_ptr, scale_ptr, gz_ptr, sums_ptr, scratch_ptr, scratch_rows,
    N, K, blocks, spans, iterations, eps, cap,
    n: tl.constexpr, PA: tl.constexpr, PR: tl.constexpr, SMOOTH: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """gmaps [N, m] or None, reads [spans, N, n] (partial gh·x_j) or None, z, r, base, scale →
    gz [N, m + 1] (r·scale·gradient of the logits, then r²/K Σ gz z) and sums [blocks, m + 3] (of base, then of scale)."""
    m: tl.constexpr = n * (n + 2)
    a, has_a, e, transposed, has_e = _columns(n, PA, PR)
    own = scratch_ptr + tl.program_id(0).to(tl.int64) * scratch_rows * 2 * n * BLOCK
    scale_a = tl.load(scale_ptr + a // n, mask=has_a, other=0.0)
    scale_e = tl.load(scale_ptr + 2)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        token = tl.arange(0, BLOCK).to(tl.int64) + block * BLOCK
        valid = token < N
        mask_a = valid[:, None] & has_a[None, :]
        mask_e = valid[:, None] & has_e[None, :]
        row = token * m
        za = tl.load(z_ptr + row[:, None] + a[None, :], mask=mask_a, other=0.0)
        ze = tl.load(z_ptr + row[:, None] + e[None, :], mask=mask_e, other=0.0)
        ga = tl.zeros([BLOCK, PA], tl.float32)
        ge = tl.zeros([BLOCK, PR], tl.float32)
        if gmaps_ptr is not None:
            ga = tl.load(gmaps_ptr + row[:, None] + a[None, :], mask=mask_a, other=0.0)
            ge = tl.load(gmaps_ptr + row[:, None] + transposed[None, :], mask=mask_e, other=0.0)
        if reads_ptr is not None:
            for s in range(spans):
                at = (tl.cast(N, tl.int64) * s + token) * n
                ga += tl.load(reads_ptr + at[:, None] + a[None, :], mask=valid[:, None] & (a < n)[None, :], other=0.0)
        h = _logits(za, a, has_a, base_ptr, scale_ptr + a // n)
        ga = tl.where((a < n)[None, :], ga, 2.0 * ga) * _sigmoid(h) * _sigmoid(-h)
        h = _logits(ze, e, has_e, base_ptr, scale_ptr + 2 + 0 * e)
        gres = balance_backward(unpack(ge, PR), unpack(_capped(h, cap, CAPPED), PR), own, iterations, eps, n, SMOOTH, BLOCK)
        ge = tl.where(mask_e, pack(gres, n * n, PR), 0.0)
        if CAPPED:
            ge *= _tanh_slope(h / cap)
        r = tl.load(r_ptr + token, mask=valid, other=0.0)
        row = token * (m + 1)
        tl.store(gz_ptr + row[:, None] + a[None, :], r[:, None] * scale_a[None, :] * ga, mask=mask_a)
        tl.store(gz_ptr + row[:, None] + e[None, :], r[:, None] * scale_e * ge, mask=mask_e)
        along = tl.sum(scale_a[None, :] * ga * za, 1) + scale_e * tl.sum(ge * ze, 1)
        tl.store(gz_ptr + row + m, r * r / K * along, mask=valid)
        sums = sums_ptr + block * (m + 3)
        tl.store(sums + a, tl.sum(ga, 0), mask=has_a)
        tl.store(sums + e, tl.sum(ge, 0), mask=has_e)
        of_scale = tl.sum(ga * za, 0)
        tl.store(sums + m, tl.sum(tl.where(a < n, of_scale, 0.0), 0))
        tl.store(sums + m + 1, tl.sum(tl.where(a < n, 0.0, of_scale), 0))
        tl.store(sums + m + 2, tl.sum(tl.sum(ge * ze, 0), 0))
