"""The compiled kernels of connections/curvature.py, as functions of tensors in this process's memory."""

from __future__ import annotations

from ctypes import c_int, c_int64, c_void_p

import torch
from torch import Tensor

from laneway.connections.kernels.cpu import backend

_CLOUDS = [c_int64, *[c_int] * 5, *[c_void_p] * 3]
_SAMPLE = [c_int, *[c_int64] * 4, c_int, *[c_void_p] * 2, *[c_int64] * 2, c_void_p, c_int, c_void_p]


def local_curvature(points: Tensor, neighbours: int, stride: int) -> tuple[Tensor, Tensor]:
    """Clouds [B, S, d] in fp32 → (Σ κ_i, number of tokens in the sum), each fp32 [B]."""
    points = points.contiguous()
    clouds, tokens, dims = points.shape
    total, count = torch.empty(2, clouds, dtype=torch.float32, device=points.device)
    pointers = (points.data_ptr(), total.data_ptr(), count.data_ptr())
    shape = (clouds, tokens, dims, neighbours, stride, torch.get_num_threads())
    backend.call("laneway_curvature", *shape, *pointers, kinds=_CLOUDS)
    return total, count


def token_sample(x: Tensor, rows: Tensor, projection: Tensor, points: Tensor) -> None:
    """Project tokens of streams into ``points``.

    Args:
        x: streams [N, n, C], fp32 or bf16; the numbers of a stream lie side by side.
        rows: which tokens, int64, no more than S.
        projection: fp32 [C, d], contiguous.
        points: fp32 [n, S, d], contiguous; the places behind the last row become NaN.
    """
    n, size, dims = points.shape
    shape = (int(x.dtype == torch.bfloat16), n, x.shape[-1], x.stride(0), x.stride(1), torch.get_num_threads())
    taken = (x.data_ptr(), rows.data_ptr(), len(rows), size)
    backend.call("laneway_token_sample", *shape, *taken, projection.data_ptr(), dims, points.data_ptr(), kinds=_SAMPLE)
