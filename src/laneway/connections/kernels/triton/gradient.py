"""Backward pass over the streams. One kernel, whose parts are left out by passing None for what they read or write.

    y given      g = H_resᵀ g_next + p ⊗ gh + (r gz) φ − (r²/K)(gz·z) y (+ what came from elsewhere), rounded once and stored:
                 the gradient of a site's input streams y. Without: g is read, the gradient of the streams a site returned
    reads given  partial sums of gh·y_j, the gradient of H_pre that was carried here
    gf given     that same g, still in registers, goes on to the site before: gf = Σ_i post_i g_i and partial sums of g_i·f
                 and g_i·x_j, the gradients of its H_post and H_res

Cut into programs as the forward kernel, partial sums a span, no atomics.
"""

from __future__ import annotations

import triton
import triton.language as tl

from laneway.connections.kernels.triton.tiles import (
    add_product,
    columns_sum,
    dot_gradient,
    load_tile,
    load_weights,
    split,
    store_tile,
)


@triton.jit
def _zeros(count: tl.constexpr, BLOCK_T: tl.constexpr, LANES: tl.constexpr):
    out = ()
    for _ in tl.static_range(count):
        out = out + (tl.zeros([BLOCK_T, LANES], tl.float32),)
    return out


@triton.jit
def _load_gz(gz_ptr, rows, valid, m: tl.constexpr, M: tl.constexpr):
    """(r gz [BLOCK_T, M], zero beyond m; r²/K Σ gz z [BLOCK_T])."""
    k = tl.arange(0, M)
    gz = tl.load(gz_ptr + rows[:, None] * (m + 1) + k[None, :], mask=valid[:, None] & (k < m)[None, :], other=0.0)
    return gz, tl.load(gz_ptr + rows * (m + 1) + m, mask=valid, other=0.0)


@triton.jit
def _input_gradient(
    next_ptr, gh_ptr, extra_ptr, y_ptr, fn_ptr, g_ptr, gz, gz_low, along, res, read, dots, rows, valid, cols, inside, C,
    n: tl.constexpr, M: tl.constexpr, READS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """The n rounded tiles of g, stored, and the sums of gh·y_j so far."""
    m: tl.constexpr = n * (n + 2)
    after = ()
    if next_ptr is not None:
        for i in tl.static_range(n):
            after = after + (load_tile(next_ptr + i * C, rows, n * C, cols, valid, inside).to(tl.float32),)
    if gh_ptr is not None:
        gh = load_tile(gh_ptr, rows, C, cols, valid, inside).to(tl.float32)
    out = ()
    added = ()
    for j in tl.static_range(n):
        y = load_tile(y_ptr + j * C, rows, n * C, cols, valid, inside).to(tl.float32)
        g = dot_gradient(gz, gz_low, fn_ptr + j * C, n * C, m, M, cols, inside)
        g = add_product(g, -along, y)
        if gh_ptr is not None:
            g = add_product(g, read[j], gh)
            if READS:
                added = added + (dots[j] + columns_sum(gh * y, VECTOR),)
        if next_ptr is not None:
            for i in tl.static_range(n):
                g = add_product(g, res[i * n + j], after[i])
        if extra_ptr is not None:
            g += load_tile(extra_ptr + j * C, rows, n * C, cols, valid, inside).to(tl.float32)
        rounded = g.to(g_ptr.dtype.element_ty)
        store_tile(g_ptr + j * C, rounded, rows, n * C, cols, valid, inside)
        out = out + (rounded,)
    return out, added


@triton.jit
def _post_gradient(
    g, x_ptr, f_ptr, gf_ptr, post, dots, rows, valid, cols, inside, C, n: tl.constexpr, VECTOR: tl.constexpr
):  # fmt: skip
    """gf of these columns, stored, and the sums of g_i·f (n) and g_i·x_j (n², [i, j]) so far."""
    f = load_tile(f_ptr, rows, C, cols, valid, inside).to(tl.float32)
    wide = ()
    for i in tl.static_range(n):
        wide = wide + (g[i].to(tl.float32),)
    gf = post[0][:, None] * wide[0]
    for i in tl.static_range(1, n):
        gf = add_product(gf, post[i], wide[i])
    store_tile(gf_ptr, gf.to(gf_ptr.dtype.element_ty), rows, C, cols, valid, inside)
    of_post = ()
    for i in tl.static_range(n):
        of_post = of_post + (dots[i] + columns_sum(wide[i] * f, VECTOR),)
    of_res = ()  # by column j, so that one tile of x is held at a time
    for j in tl.static_range(n):
        x = load_tile(x_ptr + j * C, rows, n * C, cols, valid, inside).to(tl.float32)
        for i in tl.static_range(n):
            of_res = of_res + (dots[n + j * n + i] + columns_sum(wide[i] * x, VECTOR),)
    return of_post + of_res


@triton.jit(do_not_specialize=["N"])
def gradient(
    next_ptr, gh_ptr, extra_ptr, y_ptr, fn_ptr, gz_ptr, maps_ptr, read_ptr, read_stride, g_ptr, reads_ptr,
    x_ptr, f_ptr, post_maps_ptr, gf_ptr, part_ptr, N, C,
    n: tl.constexpr, M: tl.constexpr, SPAN: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """next, extra, y, g, x [N, n, C]; gh, f, gf [N, C]; fn [m, nC] (bf16: its parts, [2, m, nC]); gz [N, m + 1];
    maps (of the site that read y), post_maps (of the site that wrote it) [N, m]; reads [spans, N, n]; part [spans, N, n + n²]."""
    tl.static_assert(SPAN % BLOCK_C == 0)
    m: tl.constexpr = n * (n + 2)
    first = tl.program_id(0).to(tl.int64) * BLOCK_T
    rows = tl.arange(0, BLOCK_T)
    valid = rows < N - first
    wide = first * n * C
    g_ptr += wide
    read = ()
    res = ()
    gz = ()
    gz_low = None
    along = ()
    reads = ()
    if y_ptr is not None:
        gz, along = _load_gz(gz_ptr + first * (m + 1), rows, valid, m, M)
        if y_ptr.dtype.element_ty == tl.bfloat16:
            gz, gz_low = split(gz)
        y_ptr += wide
        if next_ptr is not None:
            next_ptr += wide
            res = load_weights(maps_ptr + first * m, m, 2 * n, n * n, rows, valid)
        if extra_ptr is not None:
            extra_ptr += wide
        if gh_ptr is not None:
            gh_ptr += first * C
            read = load_weights(read_ptr + first * read_stride, read_stride, 0, n, rows, valid)
        if reads_ptr is not None:
            reads = _zeros(n, BLOCK_T, BLOCK_C // VECTOR)
    sums = ()
    if gf_ptr is not None:
        x_ptr += wide
        f_ptr += first * C
        gf_ptr += first * C
        post = load_weights(post_maps_ptr + first * m, m, n, n, rows, valid)
        sums = _zeros(n + n * n, BLOCK_T, BLOCK_C // VECTOR)
    start = tl.program_id(1) * SPAN
    for c in range(start, tl.minimum(start + SPAN, C), BLOCK_C):
        cols = c + tl.arange(0, BLOCK_C)
        inside = cols < C
        if y_ptr is not None:
            g, reads = _input_gradient(
                next_ptr, gh_ptr, extra_ptr, y_ptr, fn_ptr, g_ptr, gz, gz_low, along, res, read, reads, rows, valid, cols, inside,
                C, n, M, reads_ptr is not None, VECTOR,
            )  # fmt: skip
        else:
            g = ()
            for i in tl.static_range(n):
                g = g + (load_tile(g_ptr + i * C, rows, n * C, cols, valid, inside),)
        if gf_ptr is not None:
            sums = _post_gradient(g, x_ptr, f_ptr, gf_ptr, post, sums, rows, valid, cols, inside, C, n, VECTOR)
    at = tl.program_id(1) * tl.cast(N, tl.int64) + first
    if reads_ptr is not None:
        for j in tl.static_range(n):
            tl.store(reads_ptr + at * n + rows * n + j, tl.sum(reads[j], 1), mask=valid)
    if gf_ptr is not None:
        part_ptr += at * (n + n * n)
        for i in tl.static_range(n):
            tl.store(part_ptr + rows * (n + n * n) + i, tl.sum(sums[i], 1), mask=valid)
            for j in tl.static_range(n):
                tl.store(part_ptr + rows * (n + n * n) + n + i * n + j, tl.sum(sums[n + j * n + i], 1), mask=valid)
