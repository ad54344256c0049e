"""What travels: numbers as they are, rounded to bf16, or as 8-bit integers in blocks with one scale each."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = ["BLOCK", "Bfloat16", "Codec", "Int8", "codec_for"]

BLOCK = 128
"""Numbers that share one scale on the int8 wire."""
LARGEST = 127


class Bfloat16:
    """Numbers rounded to bf16, half the bytes. Error of each: at most 2⁻⁹ of it."""

    dtype = torch.bfloat16

    @staticmethod
    def length(count: int) -> int:
        """Elements of a message that carries `count` numbers."""
        return count

    @staticmethod
    def encode(numbers: Tensor, message: Tensor) -> None:
        """Write `numbers` into `message`."""
        message.copy_(numbers)

    @staticmethod
    def decode(message: Tensor, numbers: Tensor) -> None:
        """Read them back into `numbers`, of any float type."""
        numbers.copy_(message)


class Int8:
    """Blocks of 128 numbers as multiples of a 127th of the block's largest: just over a quarter of fp32's bytes.

    A message is the fp32 scales, then the multiples. Error of each number: at most a 254th of the largest in its block, which is
    half a step. A block with an infinity or a NaN comes back without any finite number that could pass for a good one.
    """

    dtype = torch.uint8

    @staticmethod
    def length(count: int) -> int:
        """Bytes of a message that carries `count` numbers; a multiple of four, so that scales of the next are aligned."""
        return 4 * -(-count // BLOCK) + -(-count // 4) * 4

    @staticmethod
    def encode(numbers: Tensor, message: Tensor) -> None:
        """Write `numbers` into `message`."""
        count = numbers.numel()
        blocks = -(-count // BLOCK)
        whole = numbers if count == blocks * BLOCK else pad(numbers, (0, blocks * BLOCK - count))
        rows = whole.view(blocks, BLOCK).to(torch.float32)
        scales = message[: 4 * blocks].view(torch.float32)
        torch.linalg.vector_norm(rows, torch.inf, dim=1, out=scales)
        scales.div_(LARGEST)
        steps = rows.div(torch.where(scales > 0, scales, 1.0).unsqueeze(1)).round_().clamp_(-LARGEST, LARGEST)
        broken = ~scales.isfinite()
        scales.masked_fill_(broken, torch.nan)
        steps.masked_fill_(broken.unsqueeze(1), 1.0)
        message[4 * blocks : 4 * blocks + count].view(torch.int8).copy_(steps.view(-1)[:count])

    @staticmethod
    def decode(message: Tensor, numbers: Tensor) -> None:
        """Read them back into `numbers`, of any float type."""
        count = numbers.numel()
        blocks, full = -(-count // BLOCK), count // BLOCK
        scales = message[: 4 * blocks].view(torch.float32)
        steps = message[4 * blocks : 4 * blocks + count].view(torch.int8)
        whole = full * BLOCK
        rows = steps[:whole].view(full, BLOCK)
        if numbers.dtype == torch.float32:
            torch.mul(rows, scales[:full].unsqueeze(1), out=numbers[:whole].view(full, BLOCK))
        else:
            numbers[:whole].view(full, BLOCK).copy_(rows * scales[:full].unsqueeze(1))
        if whole < count:
            numbers[whole:].copy_(steps[whole:] * scales[full])


Codec = type[Bfloat16] | type[Int8]


def codec_for(wire: str, dtype: torch.dtype) -> Codec | None:
    """How numbers of a type travel; None: as they are, where that is already as small as the wire asks."""
    if wire == "int8":
        return Int8
    return Bfloat16 if wire == "bf16" and dtype.itemsize > 2 else None
