"""Forward pass over the streams. One kernel, whose parts are left out by passing None for what they read or write:

    y given      y = H_res x + H_postᵀ f, rounded once; else y is x itself, as it lies in memory
    part given   partial sums of y φᵀ and Σ y², of the rounded y while it is in registers
    h given      h = Σ_j p_j y_j, p from maps that are finished already

A program takes BLOCK_T tokens and SPAN columns of every stream. How C is cut depends on C alone, so a token's sums are added
in one order whatever the number of tokens, and small batches still give every multiprocessor work.
"""

from __future__ import annotations

import triton
import triton.language as tl

from laneway.connections.kernels.triton.tiles import (
    add_product,
    columns_sum,
    dot_projection,
    load_tile,
    load_weights,
    store_tile,
)


@triton.jit
def _load_streams(x_ptr, rows, valid, cols, inside, C, n: tl.constexpr):
    x = ()
    for j in tl.static_range(n):
        x = x + (load_tile(x_ptr + j * C, rows, n * C, cols, valid, inside).to(tl.float32),)
    return x


@triton.jit
def _mix(x, f, post, res, i: tl.constexpr, valid, inside, n: tl.constexpr):
    """Stream i of y, not yet rounded.

    Outside it is zero already. Without the ``where`` the compiler derives the operand of the projection a second time, in the
    operand's own layout from the loads on and in every warp: twice the arithmetic, and hundreds of registers spilled.
    """
    total = post[i][:, None] * f
    for j in tl.static_range(n):
        total = add_product(total, res[i * n + j], x[j])
    return tl.where(valid[:, None] & inside[None, :], total, 0.0)


@triton.jit(do_not_specialize=["N"])
def streams(
    x_ptr, f_ptr, maps_ptr, read_ptr, read_stride, fn_ptr, y_ptr, h_ptr, part_ptr, N, C,
    n: tl.constexpr, M: tl.constexpr, SPAN: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """x [N, n, C], f [N, C], maps [N, m], read [N, ≥ n], fn [m, nC] (bf16: its parts, [2, m, nC]) →
    y [N, n, C], h [N, C], part [spans, N, m + 1]."""
    tl.static_assert(SPAN % BLOCK_C == 0)
    m: tl.constexpr = n * (n + 2)
    first = tl.program_id(0).to(tl.int64) * BLOCK_T
    rows = tl.arange(0, BLOCK_T)
    valid = rows < N - first
    x_ptr += first * n * C
    if y_ptr is not None:
        f_ptr += first * C
        maps_ptr += first * m
        y_ptr += first * n * C
        post = load_weights(maps_ptr, m, n, n, rows, valid)
        res = load_weights(maps_ptr, m, 2 * n, n * n, rows, valid)
    if h_ptr is not None:
        h_ptr += first * C
        read = load_weights(read_ptr + first * read_stride, read_stride, 0, n, rows, valid)
    acc = tl.zeros([BLOCK_T, M], tl.float32)
    squares = tl.zeros([BLOCK_T, BLOCK_C // VECTOR], tl.float32)
    start = tl.program_id(1) * SPAN
    for c in range(start, tl.minimum(start + SPAN, C), BLOCK_C):
        cols = c + tl.arange(0, BLOCK_C)
        inside = cols < C
        if y_ptr is not None:
            f = load_tile(f_ptr, rows, C, cols, valid, inside).to(tl.float32)
            x = _load_streams(x_ptr, rows, valid, cols, inside, C, n)
        h = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
        for i in tl.static_range(n):  # all uses of one stream together: its tile is then gone
            if y_ptr is not None:
                y = _mix(x, f, post, res, i, valid, inside, n).to(y_ptr.dtype.element_ty)
                store_tile(y_ptr + i * C, y, rows, n * C, cols, valid, inside)
            else:
                y = load_tile(x_ptr + i * C, rows, n * C, cols, valid, inside)
            wide = y.to(tl.float32)
            if h_ptr is not None:
                h = add_product(h, read[i], wide)
            if part_ptr is not None:
                squares += columns_sum(wide * wide, VECTOR)
                acc = dot_projection(y, fn_ptr + i * C, n * C, m, cols, inside, acc)
        if h_ptr is not None:
            store_tile(h_ptr, h.to(h_ptr.dtype.element_ty), rows, C, cols, valid, inside)
    if part_ptr is not None:
        part_ptr += (tl.program_id(1) * tl.cast(N, tl.int64) + first) * (m + 1)
        outputs = tl.arange(0, M)
        at = part_ptr + rows[:, None] * (m + 1) + outputs[None, :]
        tl.store(at, acc, mask=valid[:, None] & (outputs < m)[None, :])
        tl.store(part_ptr + rows * (m + 1) + m, tl.sum(squares, 1), mask=valid)
