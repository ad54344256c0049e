"""Flags: where they are set, and eight in a byte, the first in the lowest bit; on any device."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

__all__ = ["nonzero", "pack", "unpack"]

_GATHER = 0x0102040810204080
"""Times eight bytes of 0 or 1, seen as one little-endian integer, brings the eight bits together in the highest byte."""


def nonzero(flags: Tensor) -> Tensor:
    """Where [m] bool is set: int64, ascending."""
    if flags.device.type == "cpu":  # several times faster than torch's
        return torch.from_numpy(np.flatnonzero(flags.numpy()))
    return flags.nonzero().squeeze(1)


def pack(flags: Tensor) -> Tensor:
    """[m] bool → [⌈m / 8⌉] uint8."""
    short = -flags.numel() % 8
    if short:
        flags = torch.cat([flags, flags.new_zeros(short)])
    if not flags.is_contiguous() or flags.storage_offset() % 8:
        flags = flags.clone(memory_format=torch.contiguous_format)
    return (flags.view(torch.int64) * _GATHER >> 56).to(torch.uint8)


def unpack(packed: Tensor, m: int) -> Tensor:
    """[⌈m / 8⌉] uint8 → [m] bool."""
    return _table(packed.device)[packed.to(torch.int32)].view(torch.bool)[:m]


@lru_cache(maxsize=16)
def _table(device: torch.device) -> Tensor:
    """The eight flags of each byte, as one int64: [256]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=device)
    flags = (torch.arange(256, dtype=torch.uint8, device=device)[:, None] >> shifts & 1).bool()
    return flags.view(torch.int64).view(256)
