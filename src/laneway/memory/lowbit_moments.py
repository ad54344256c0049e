"""An optimizer's moment in 8 or 4 bits: codes, and scales that bring them to the moment's size.

8 bits: blocks of 256 elements with a scale each (Dettmers et al., arXiv 2110.02861). 4 bits (Li, Chen and Zhu, arXiv 2309.01507):
blocks of 128 for first moments and for vectors; the second moment of a matrix, or of more dimensions, has a scale for every row,
column and so on, and an element goes by the least of its own ("rank-1 normalisation").
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from laneway.memory.lowbit_codes import pack, table, unpack

CODES, SCALES = "_codes", "_scales"  # what the names of a moment's codes and scales end with in an optimizer's state
BLOCKS = {8: 256, 4: 128}
TILE = 1 << 17  # elements that are coded at a time on a CPU: what is in between stays in the cache


@dataclass(frozen=True)
class Format:
    """How moments of one shape are held.

    Attributes:
        bits: 8 or 4.
        signed: False for second moments, which are ≥ 0.
        shape: of the moment.
    """

    bits: int
    signed: bool
    shape: torch.Size

    @property
    def by_axes(self) -> bool:
        """Whether scales go by rows and columns rather than by blocks."""
        return self.bits == 4 and not self.signed and len(self.shape) > 1

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes."""
        return -(-self.shape.numel() * self.bits // 8)

    @property
    def scales(self) -> int:
        """How many scales, of 4 bytes each."""
        return sum(self.shape) if self.by_axes else -(-self.shape.numel() // BLOCKS[self.bits])

    @property
    def width(self) -> int:
        """Elements of a row that has scales of its own: the last axis, or a block."""
        return self.shape[-1] if self.by_axes else BLOCKS[self.bits]

    def empty(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Room for codes [code_bytes] uint8 and scales [scales] fp32."""
        return torch.empty(self.code_bytes, dtype=torch.uint8, device=device), torch.empty(self.scales, device=device)

    def encode(self, moment: Tensor, codes: Tensor, scales: Tensor) -> None:
        """Write a moment's codes and scales. Where it isn't finite, its block (its row and its column) decodes to NaN."""
        moment = moment.detach()
        flat, used = moment.reshape(-1), table(self.bits, self.signed, moment.device)
        scales.copy_(_largest_by_axis(moment) if self.by_axes else _largest_by_block(flat, BLOCKS[self.bits]))
        scales.masked_fill_(scales.isinf(), torch.nan)
        for start, end, scale in self._tiles(torch.where(scales == 0, 1.0, scales)):
            part = _as_rows(flat[start:end].float(), len(scale), self.width).div(scale).view(-1)[: end - start]
            found = used.codes(part.nan_to_num_(0.0))
            if self.bits == 8:
                codes[start:end] = found
            else:
                codes[start // 2 : -(-end // 2)] = pack(pad(found, (0, len(found) % 2)))

    def decode(self, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        """Write the moment again, up to the error of its codes, to ``out`` of the same shape."""
        whole = out if out.is_contiguous() else torch.empty(self.shape, dtype=out.dtype, device=out.device)
        flat, used = whole.view(-1), table(self.bits, self.signed, codes.device)
        for start, end, scale in self._tiles(scales):
            own = codes[start:end] if self.bits == 8 else unpack(codes[start // 2 : -(-end // 2)])[: end - start]
            flat[start:end] = _as_rows(used.numbers(own), len(scale), self.width).mul_(scale).view(-1)[: end - start]
        if whole is not out:
            out.copy_(whole)

    def _tiles(self, scales: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """Parts of the flat moment, begin and end, with the scales of their rows: [rows, 1] or [rows, columns]."""
        count, most = self.shape.numel(), TILE if scales.device.type == "cpu" else self.shape.numel()
        width = self.width
        by_row = self._row_scales(scales) if self.by_axes else scales
        step = max(2, most // width // 2 * 2)
        for row in range(0, len(by_row), step):
            scale = by_row[row : row + step, None]
            if self.by_axes:
                scale = torch.minimum(scale, scales[-width:])
            yield row * width, min((row + step) * width, count), scale

    def _row_scales(self, scales: Tensor) -> Tensor:
        """[elements of all axes but the last]: the least scale over those axes."""
        parts = scales[: -self.shape[-1]].split(list(self.shape[:-1]))
        found = parts[0]
        for part in parts[1:]:
            found = torch.minimum(found[:, None], part).flatten()
        return found


def is_encoded(name: str) -> bool:
    """Whether an entry of an optimizer's state is codes or scales."""
    return name.endswith((CODES, SCALES))


def _largest_by_axis(moment: Tensor) -> Tensor:
    """[Σ sizes]: for every row, every column and so on the largest in it; all of them ≥ 0."""
    axes = range(moment.dim())
    return torch.cat([moment.amax([other for other in axes if other != axis]).float() for axis in axes])


def _largest_by_block(flat: Tensor, block: int) -> Tensor:
    """[⌈n / block⌉]: the largest magnitude of each block."""
    whole = len(flat) // block * block
    blocks = [flat[:whole].view(-1, block), flat[None, whole:]]
    low, high = (torch.cat([least(part, 1) for part in blocks if part.numel()]).float() for least in (torch.amin, torch.amax))
    return torch.maximum(low.neg_(), high)


def _as_rows(flat: Tensor, rows: int, width: int) -> Tensor:
    """[n] as [rows, width], with zeros at the end where the last row is not full."""
    return pad(flat, (0, rows * width - len(flat))).view(rows, width) if len(flat) < rows * width else flat.view(rows, width)
