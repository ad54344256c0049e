"""A tile [tokens, P] taken apart into P vectors over tokens, and put together again.

The kernels over maps keep one token a lane. Memory is read and written as tiles all the same: 16 bytes a lane at once, and an
access for a tile instead of one for each column (which the compiler analyses one by one, for minutes where there are many).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def unpack(tile, P: tl.constexpr):
    """[B, P] → P vectors [B]; P a power of two, at least two."""
    parts = (tile,)
    for level in tl.static_range(8):
        if (P >> level) > 1:
            halves = ()
            for k in tl.static_range(1 << level):
                t = parts[k]
                if (P >> level) > 2:
                    t = tl.trans(tl.reshape(t, (t.shape[0], 2, P >> (level + 1))), (0, 2, 1))
                low, high = tl.split(t)
                halves = halves + (low, high)
            parts = halves
    return parts


@triton.jit
def pack(vectors, count: tl.constexpr, P: tl.constexpr):
    """The first ``count`` vectors [B] → [B, P], the first of them again in the columns beyond."""
    parts = ()
    for k in tl.static_range(P):
        parts = parts + (vectors[k if k < count else 0],)
    for level in tl.static_range(8):
        if (P >> level) > 1:
            joined = ()
            for k in tl.static_range(P >> (level + 1)):
                t = tl.join(parts[2 * k], parts[2 * k + 1])
                if level > 0:
                    t = tl.reshape(tl.trans(t, (0, 2, 1)), (t.shape[0], 2 << level))
                joined = joined + (t,)
            parts = joined
    return parts[0]
