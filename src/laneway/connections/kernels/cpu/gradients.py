"""Sums over the paths of gradients on the CPU, compiled: one call for all of them."""

from __future__ import annotations

from ctypes import c_int, c_void_p

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from laneway.connections.kernels.cpu import backend
from laneway.connections.transport import BINS

SEGMENT = np.dtype([("data", np.uint64), ("size", np.int64), ("narrow", np.int32), ("path", np.int32)])
"""Contiguous numbers of a gradient: address, how many, whether they are bf16 (else fp32), whose they are."""
Segments = NDArray[np.void]


def path_sums(segments: Segments, paths: int) -> tuple[Tensor, Tensor]:
    """→ (Σ g², max |g|) of each path, float64 [paths]; a NaN stays one."""
    squares, peaks = torch.empty(2, paths, dtype=torch.float64, device="cpu")
    arguments = (len(segments), segments.ctypes.data, paths, squares.data_ptr(), peaks.data_ptr(), torch.get_num_threads())
    backend.call("laneway_path_sums", *arguments, kinds=[c_int, c_void_p, c_int, c_void_p, c_void_p, c_int])
    return squares, peaks


def path_counts(segments: Segments, firsts: NDArray[np.int64], steps: NDArray[np.int64], paths: int) -> Tensor:
    """Counts of every so many-th magnitude of each segment, from a first one on, float64 [paths, BINS] (``transport``)."""
    found = torch.zeros(paths, BINS, dtype=torch.float64, device="cpu")
    arguments = (len(segments), segments.ctypes.data, firsts.ctypes.data, steps.ctypes.data, found.data_ptr())
    backend.call("laneway_path_counts", *arguments, kinds=[c_int, *[c_void_p] * 4])
    return found
