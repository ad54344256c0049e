"""Tensors as 8-bit integers with a scale for every block: a quarter of the bytes of fp32, with an error that is known.

Block-wise quantization by the largest magnitude (as of arXiv 2110.02861, with linear instead of dynamic codes). Lossy, so
nothing here is used unless it is asked for. Not for what is exponentiated later, as log-softmax outputs: a small error there is a
large one after.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from laneway.core import InputError

BLOCK = 128
LARGEST = 127


@dataclass(frozen=True)
class Encoded:
    """``data``: [numel] int8; ``scales``: [⌈numel / 128⌉] fp32, each the step of one block; shape and dtype of the original."""

    data: Tensor
    scales: Tensor
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of data and scales."""
        return self.data.nbytes + self.scales.nbytes


def encode(tensor: Tensor) -> Encoded:
    """Quantize a floating-point tensor of any shape; each element's error is at most 1/254 of its block's largest magnitude.

    A block with a NaN or an infinity in it decodes to NaN throughout.
    """
    if not tensor.is_floating_point():
        raise InputError("tensor", tensor.dtype, "a floating-point dtype")
    blocks = _blocks(tensor.detach())
    largest = blocks.abs().amax(dim=1) if tensor.numel() else blocks.new_zeros(0)
    scales = torch.where(largest.isfinite(), largest / LARGEST, torch.nan)
    steps = torch.where(scales > 0, scales, 1.0)
    data = (blocks / steps[:, None]).round_().clamp_(-LARGEST, LARGEST).nan_to_num_(0.0).to(torch.int8)
    return Encoded(data.flatten()[: tensor.numel()].clone(), scales, tensor.shape, tensor.dtype)


def decode(encoded: Encoded) -> Tensor:
    """The tensor again, contiguous, up to the error of ``encode``."""
    blocks = _blocks(encoded.data) * encoded.scales[:, None]
    return blocks.flatten()[: encoded.data.numel()].reshape(encoded.shape).to(encoded.dtype)


def error_of(tensor: Tensor) -> float:
    """‖decoded − tensor‖ / ‖tensor‖ (Frobenius), 0.0 for a tensor of zeros."""
    exact = tensor.detach().double()
    norm = float(exact.norm())
    return float((decode(encode(tensor)).double() - exact).norm()) / norm if norm else 0.0


def _blocks(tensor: Tensor) -> Tensor:
    """[⌈numel / 128⌉, 128] fp32, zeros at the end."""
    flat = tensor.reshape(-1).float()
    return torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
