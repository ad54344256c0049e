"""What all stream kernels do with a tile: load it, multiply it without losing digits, sum its columns."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_tile(ptr, rows, stride, cols, valid, inside):
    """[BLOCK_T, BLOCK_C] from rows ``stride`` apart, zero outside; offsets are within the program's own tokens: 32 bits do."""
    return tl.load(ptr + rows[:, None] * stride + cols[None, :], mask=valid[:, None] & inside[None, :], other=0.0)


@triton.jit
def store_tile(ptr, tile, rows, stride, cols, valid, inside):
    """The reverse of ``load_tile``."""
    tl.store(ptr + rows[:, None] * stride + cols[None, :], tile, mask=valid[:, None] & inside[None, :])


@triton.jit
def load_weights(ptr, stride, first: tl.constexpr, count: tl.constexpr, rows, valid):
    """``count`` numbers a token from column ``first`` on, each a vector [BLOCK_T]."""
    out = ()
    for k in tl.static_range(count):
        out = out + (tl.load(ptr + rows * stride + first + k, mask=valid, other=0.0),)
    return out


@triton.jit
def add_product(total, weight, tile):
    """total + weight · tile, a weight a token. An fma by name: every kernel rounds alike, whatever the compiler would fuse."""
    return tl.fma(tl.broadcast_to(weight[:, None], tile.shape), tile, total)


@triton.jit
def split(v):
    """fp32 as the sum of two bf16: what is lost is below 2⁻¹⁶ of it (2⁻¹⁷ where conversions round to nearest)."""
    high = v.to(tl.bfloat16)
    return high, (v - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit(do_not_specialize=["count"])
def split_projection(fn_ptr, out_ptr, count, BLOCK: tl.constexpr):
    """fn [count] → out [2, count] in bf16, the high parts and the low ones."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    high, low = split(tl.load(fn_ptr + at, mask=at < count, other=0.0))
    tl.store(out_ptr + at, high, mask=at < count)
    tl.store(out_ptr + count + at, low, mask=at < count)


@triton.jit
def dot_projection(tile, fn_ptr, stride, m: tl.constexpr, cols, inside, acc):
    """acc + tile · φᵀ of one stream's columns, [BLOCK_T, M].

    fp32 tiles: φ fp32 as it is, and never TF32. bf16 tiles are exact as they are, and φ is in two bf16 parts.
    """
    outputs = tl.arange(0, acc.shape[1])
    at = fn_ptr + outputs[None, :] * stride + cols[:, None]
    mask = inside[:, None] & (outputs < m)[None, :]
    w = tl.load(at, mask=mask, other=0.0)
    if tile.dtype == tl.bfloat16:
        acc = tl.dot(tile, w, acc)
        return tl.dot(tile, tl.load(at + m * stride, mask=mask, other=0.0), acc)
    else:
        return tl.dot(tile, w, acc, input_precision="ieee")


@triton.jit
def dot_gradient(high, low, fn_ptr, stride, m: tl.constexpr, M: tl.constexpr, cols, inside):
    """gz φ of one stream's columns, [BLOCK_T, BLOCK_C]; gz [BLOCK_T, M] fp32 (and low None), or in two bf16 parts as φ then is.

    Of the four products that of the two low parts is left out: it is below what the parts have lost.
    """
    k = tl.arange(0, M)
    at = fn_ptr + k[:, None] * stride + cols[None, :]
    mask = (k < m)[:, None] & inside[None, :]
    w = tl.load(at, mask=mask, other=0.0)
    if low is None:
        return tl.dot(high, w, input_precision="ieee")
    else:
        acc = tl.dot(low, w)
        acc = tl.dot(high, tl.load(at + m * stride, mask=mask, other=0.0), acc)
        return tl.dot(high, w, acc)


@triton.jit
def dot_left(w, tile, acc):
    """acc + w · tile: w fp32, split in two where the tile is bf16."""
    if tile.dtype == tl.bfloat16:
        high, low = split(w)
        acc = tl.dot(low, tile, acc)
        return tl.dot(high, tile, acc)
    else:
        return tl.dot(w, tile, acc, input_precision="ieee")


@triton.jit
def columns_sum(tile, VECTOR: tl.constexpr):
    """[T, C] → [T, C / VECTOR]: the part of a sum over columns that one thread can do with what it holds."""
    T: tl.constexpr = tile.shape[0]
    C: tl.constexpr = tile.shape[1]
    return tl.sum(tl.reshape(tile, (T, C // VECTOR, VECTOR)), 2)
