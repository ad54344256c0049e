"""Sizes of the launches, and the one place where a kernel is started."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from laneway.connections.kernels.triton import LARGEST
from laneway.core import InputError

SPAN = 512  # columns of every stream for one program: partial sums cost 2 · 4 (m + 1) / SPAN bytes a token and column
LARGEST_FUSED = 4  # streams of a fused backward pass: more spill the registers, and g is read again instead
LANES = 64 if torch.version.hip else 32  # tokens of a program of the maps: one warp, one token a lane
SCRATCH_PROGRAMS = 1024  # of the maps' backward at most; more tokens are looped over, so its scratch does not grow
PROJECTION_TOKENS = 256  # for one partial sum of the gradient of φ at least
PROJECTION_PROGRAMS = 1024  # of the gradient of φ at most: bounds its workspace at m · BLOCK_K · 4 bytes each


@dataclass(frozen=True)
class Site:
    """What every launch of one site has in common: n streams of width C, N tokens, and the tiles that suit them."""

    tokens: int
    n: int
    width: int
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(x: Tensor) -> Site:
        """From streams [N, n, C].

        Raises:
            InputError: a dtype or number of streams that has no kernel.
        """
        if x.dtype not in (torch.float32, torch.bfloat16):
            raise InputError("dtype", x.dtype, "torch.float32 or torch.bfloat16", "the Triton kernels have no other")
        tokens, n, width = x.shape
        if not 1 <= n <= LARGEST:
            raise InputError("streams", n, f"1 … {LARGEST}", "the Triton kernels hold a token's matrix in registers")
        return Site(tokens, n, width, x.dtype, x.device)

    @property
    def m(self) -> int:
        """Maps a token."""
        return self.n * (self.n + 2)

    @property
    def spans(self) -> int:
        """Programs that share a token: a function of C alone."""
        return triton.cdiv(self.width, SPAN)

    @property
    def padded(self) -> int:
        """Maps a token as a side of a matrix product."""
        return max(16, triton.next_power_of_2(self.m))

    @property
    def vector(self) -> int:
        """Numbers in 16 bytes."""
        return 16 // self.dtype.itemsize

    def map_options(self) -> dict[str, Any]:
        """Constants of the kernels over maps: one warp, one token a lane."""
        widths = {"PA": triton.next_power_of_2(2 * self.n), "PR": max(2, triton.next_power_of_2(self.n**2))}
        return {"n": self.n, **widths, "BLOCK": LANES, "num_warps": 1, "num_stages": 1}

    def stream_grid(self, block: int) -> tuple[int, int]:
        """Tokens first: programs that run at once then share their columns of φ."""
        return triton.cdiv(self.tokens, block), self.spans

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A workspace or a result."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def stream_options(self, products: bool) -> dict[str, Any]:
        """Constants of the forward kernel; ``products``: with the projection."""
        return {"n": self.n, "M": self.padded, "SPAN": SPAN, "VECTOR": self.vector, **_forward_tile(self.n, products)}

    def gradient_options(self) -> dict[str, Any]:
        """Constants of the backward kernel over streams."""
        return {
            "n": self.n,
            "M": self.padded,
            "SPAN": SPAN,
            "VECTOR": self.vector,
            **_backward_tile(self.n, self.dtype == torch.float32),
        }


def _forward_tile(n: int, products: bool) -> dict[str, int]:
    """Many tokens a program, since each reads all of φ from the L2 cache. One stage: x stays in registers for all its uses."""
    if products and n > 4:
        return {"BLOCK_T": 32, "BLOCK_C": 32, "num_warps": 8, "num_stages": 1}
    return {"BLOCK_T": 64, "BLOCK_C": 32, "num_warps": 8, "num_stages": 1}


def _backward_tile(n: int, wide: bool) -> dict[str, int]:
    """``wide``: fp32 streams. As many tokens as registers allow: they hold n streams twice and n² sums."""
    if n > 4 or wide:
        return {"BLOCK_T": 16, "BLOCK_C": 64, "num_warps": 8, "num_stages": 1}
    return {"BLOCK_T": 64, "BLOCK_C": 32, "num_warps": 8, "num_stages": 1}


def run(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Start ``kernel`` on the device of its tensors."""
    tensor = next(a for a in arguments if isinstance(a, Tensor))
    with torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext():
        kernel[grid](*arguments, **options)
