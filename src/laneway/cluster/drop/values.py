"""fp32 values as they travel. What is lost by narrowing is an fp32 number: value − narrowed never rounds.

bf16 takes the nearest; int8 has one power of two for 64 values, the smallest with which the largest of them fits into ±127.
Both keep finite values finite. Proof that the difference is exact: value and narrowed value are multiples of the value's last
bit (or the narrowed value is zero), and their difference is no larger than the value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from laneway.cluster.drop.sizes import BLOCK

__all__ = ["MOST", "narrow", "widen"]

MOST = torch.finfo(torch.float32).max
_LARGEST = torch.finfo(torch.bfloat16).max
_BIAS = 127  # a scale of 2**(byte − 127); byte 255 stands for no number


def narrow(values: Tensor, wire: str) -> tuple[Tensor, Tensor | None]:
    """Finite fp32 [s] → what travels [s], and int8's scales, [⌈s / 64⌉] uint8."""
    if wire == "fp32":
        return values, None
    if wire == "bf16":
        return values.clamp(-_LARGEST, _LARGEST).to(torch.bfloat16), None
    blocks = _blocks(values)
    exponent = torch.frexp(blocks.abs().amax(1) / 127).exponent.clamp(1 - _BIAS, _BIAS - 1)
    codes = (blocks * _power(-exponent)).round_().clamp_(-127, 127).to(torch.int8)
    return codes.view(-1)[: values.numel()], (exponent + _BIAS).to(torch.uint8)


def widen(travelled: Tensor, scales: Tensor | None) -> Tensor:
    """Undo of ``narrow``: fp32 [s]."""
    if scales is None:
        return travelled.float()
    return (_blocks(travelled.float()) * _power(scales.to(torch.int32) - _BIAS)).view(-1)[: travelled.numel()]


def _power(exponents: Tensor) -> Tensor:
    """2 to the power of int32 [n] in −126 … 127, fp32 [n, 1]: written as bits, so exact on every device."""
    return (exponents + _BIAS << 23).view(torch.float32)[:, None]


def _blocks(values: Tensor) -> Tensor:
    short = -values.numel() % BLOCK
    if short:
        values = torch.cat([values, values.new_zeros(short)])
    return values.view(-1, BLOCK)
