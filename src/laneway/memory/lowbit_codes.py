"""Codes of 8 and 4 bits for an optimizer's moments: numbers between −1 and 1 by their place in a table, beside scales.

Signed tables and the unsigned one of 8 bits are dynamic: the fraction gets the bits that the exponent leaves (Dettmers et al.,
arXiv 2110.02861). The unsigned one of 4 bits is linear and has no zero (Li, Chen and Zhu, arXiv 2309.01507): a second moment that
became zero would make its update huge. For the same reason nothing above zero becomes zero in the unsigned table of 8 bits.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

CELLS = 1 << 16  # of the upper half of a float's bits


def dynamic_table(signed: bool, exponents: int, bits: int) -> list[float]:
    """The 2^bits values of the dynamic tree of ``bits`` bits with at most ``exponents`` of them zeros before the fraction."""
    fraction = bits - 1 - exponents
    found = [0.0, 1.0]
    for at in range(exponents):
        pieces = 2 ** (at + fraction) if signed else 2 ** (at + fraction + 1)
        bounds = torch.linspace(0.1, 1, pieces + 1)
        values = (10.0 ** (at - exponents + 1) * (bounds[:-1] + bounds[1:]) / 2).tolist()
        found += values + [-value for value in values if signed]
    return sorted(found)


class Table:
    """Values of codes in rising order, and the nearest code of a number.

    Args:
        values: at most 256.
        zero_is_zero: whether only zero itself may become zero; then ``values`` begins with it.
        device: where numbers to code are.
    """

    def __init__(self, values: list[float], zero_is_zero: bool, device: torch.device) -> None:
        self.values = torch.tensor(values, dtype=torch.float32)
        middles = ((self.values[1:].double() + self.values[:-1].double()) / 2).float()
        if zero_is_zero:
            middles[0] = torch.finfo(torch.float32).smallest_normal * torch.finfo(torch.float32).eps
        self._above = torch.cat([middles, torch.tensor([torch.inf])])
        bits = torch.arange(-CELLS // 2, CELLS // 2, dtype=torch.int32) << 16
        lowest = torch.where(bits < 0, bits | 0xFFFF, bits).view(torch.float32)
        self._below = torch.bucketize(lowest.nan_to_num(), middles, right=True).to(torch.uint8)
        self.values, self._above, self._below = (t.to(device) for t in (self.values, self._above, self._below))

    def codes(self, numbers: Tensor) -> Tensor:
        """[n] fp32 in −1 … 1 → [n] uint8, exactly the nearest value's (halfway: the upper one's)."""
        cells = (numbers.view(torch.int32) >> 16).add_(CELLS // 2)
        below = self._below.index_select(0, cells)  # of the least number with these bits; at most one value lies further up
        return below.add_(numbers >= self._above.index_select(0, below.int()))

    def numbers(self, codes: Tensor) -> Tensor:
        """[n] uint8 → [n] fp32."""
        return self.values.index_select(0, codes.int())


@cache
def table(bits: int, signed: bool, device: torch.device) -> Table:
    """The table for first (signed) or second moments."""
    if bits == 8:
        return Table(dynamic_table(signed, 7, 8), not signed, device)
    return Table(dynamic_table(True, 3, 4), False, device) if signed else Table([at / 16 for at in range(1, 17)], False, device)


def pack(codes: Tensor) -> Tensor:
    """[n] of 4 bits, n even → [n/2] bytes; the first of two in the upper half."""
    return (codes[::2] << 4).add_(codes[1::2])


def unpack(packed: Tensor) -> Tensor:
    """Undo of ``pack``."""
    return torch.stack([packed >> 4, packed & 15], dim=1).flatten()
