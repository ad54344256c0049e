"""The small reductions of the backward pass, each in one fixed order.

read_gradient        partial sums of gh·x_j: needed before the maps' backward, which the streams' gradient waits for
projection_gradient  partial sums over tokens of gzᵀ x, the gradient of φ
token_sums           partial sums a span → one number a token and map
first_sums           [R, W] → [W]: the second stage of everything summed over tokens
"""

from __future__ import annotations

import triton
import triton.language as tl

from laneway.connections.kernels.triton.tiles import columns_sum, dot_left, load_tile


@triton.jit(do_not_specialize=["N"])
def read_gradient(
    gh_ptr, x_ptr, reads_ptr, N, C,
    n: tl.constexpr, SPAN: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """gh [N, C], x [N, n, C] → reads [spans, N, n]."""
    tl.static_assert(SPAN % BLOCK_C == 0)
    first = tl.program_id(0).to(tl.int64) * BLOCK_T
    rows = tl.arange(0, BLOCK_T)
    valid = rows < N - first
    gh_ptr += first * C
    x_ptr += first * n * C
    sums = ()
    for _ in tl.static_range(n):
        sums = sums + (tl.zeros([BLOCK_T, BLOCK_C // VECTOR], tl.float32),)
    start = tl.program_id(1) * SPAN
    for c in range(start, tl.minimum(start + SPAN, C), BLOCK_C):
        cols = c + tl.arange(0, BLOCK_C)
        inside = cols < C
        gh = load_tile(gh_ptr, rows, C, cols, valid, inside).to(tl.float32)
        added = ()
        for j in tl.static_range(n):
            x = load_tile(x_ptr + j * C, rows, n * C, cols, valid, inside).to(tl.float32)
            added = added + (sums[j] + columns_sum(gh * x, VECTOR),)
        sums = added
    reads_ptr += (tl.program_id(1) * tl.cast(N, tl.int64) + first) * n
    for j in tl.static_range(n):
        tl.store(reads_ptr + rows * n + j, tl.sum(sums[j], 1), mask=valid)


@triton.jit(do_not_specialize=["N", "tokens"])
def projection_gradient(
    gz_ptr, x_ptr, out_ptr, N, K, tokens,
    m: tl.constexpr, M: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """gz [N, m + 1] (r·gz and more), x [N, K] → out [splits, m, K]; a split is ``tokens`` of the N."""
    cols = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = cols < K
    k = tl.arange(0, M)
    first = tl.program_id(1).to(tl.int64) * tokens
    left = tl.minimum(N - first, tokens)
    rows = tl.arange(0, BLOCK_T)
    acc = tl.zeros([M, BLOCK_K], tl.float32)
    for t in range(0, left, BLOCK_T):
        valid = rows < left - t
        mask = (k < m)[:, None] & valid[None, :]
        gz = tl.load(gz_ptr + (first + t) * (m + 1) + k[:, None] + rows[None, :] * (m + 1), mask=mask, other=0.0)
        x = load_tile(x_ptr + (first + t) * K, rows, K, cols, valid, inside)
        acc = dot_left(gz, x, acc)
    out_ptr += tl.program_id(1).to(tl.int64) * m * K
    tl.store(out_ptr + k[:, None] * K + cols[None, :], acc, mask=(k < m)[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["N", "spans"])
def token_sums(part_ptr, out_ptr, N, spans, count, first, width, P: tl.constexpr, BLOCK: tl.constexpr):
    """part [spans, N, count] → out [N, width], in columns ``first`` on; the columns before are zero."""
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, P)
    mask = (token < N)[:, None] & (column < width)[None, :]
    total = tl.zeros([BLOCK, P], tl.float32)
    for s in range(spans):
        at = part_ptr + (tl.cast(N, tl.int64) * s + token)[:, None] * count + (column - first)[None, :]
        total += tl.load(at, mask=mask & (column >= first)[None, :], other=0.0)
    tl.store(out_ptr + token[:, None] * width + column[None, :], total, mask=mask)


@triton.jit(do_not_specialize=["R"])
def first_sums(part_ptr, out_ptr, R, W, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr):
    """part [R, W] → out [W]."""
    cols = tl.program_id(0).to(tl.int64) * BLOCK_W + tl.arange(0, BLOCK_W)
    inside = cols < W
    total = tl.zeros([BLOCK_R, BLOCK_W], tl.float32)
    for start in range(0, R, BLOCK_R):
        rows = start + tl.arange(0, BLOCK_R)
        offsets = rows.to(tl.int64)[:, None] * W + cols[None, :]
        total += tl.load(part_ptr + offsets, mask=(rows < R)[:, None] & inside[None, :], other=0.0)
    tl.store(out_ptr + cols, tl.sum(total, 0), mask=inside)
