"""Units of a vector, single entries or blocks of 64, as rows: taken out, added, put in. The last block may be short; its row ends
in zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from laneway.cluster.drop.sizes import BLOCK

__all__ = ["add_rows", "norms", "put_rows", "take_rows"]


def take_rows(vector: Tensor, units: Tensor, unit: int) -> Tensor:
    """What lies in the units (int64, ascending): [s, unit], or [s] for single entries."""
    if unit == 1:
        return vector.index_select(0, units)
    whole, rest = _split(vector)
    if not _ends(units, whole, rest):
        return whole.index_select(0, units)
    return torch.cat([whole.index_select(0, units[:-1]), _padded(rest)])


def add_rows(total: Tensor, units: Tensor, rows: Tensor, factor: int) -> None:
    """total[units] += factor · rows; no unit comes twice."""
    if rows.dim() == 1:
        total.index_add_(0, units, rows, alpha=factor)
        return
    whole, rest = _split(total)
    if _ends(units, whole, rest):
        rest.add_(rows[-1, : rest.numel()], alpha=factor)
        units, rows = units[:-1], rows[:-1]
    whole.index_copy_(0, units, whole.index_select(0, units).add_(rows, alpha=factor))


def put_rows(out: Tensor, units: Tensor, rows: Tensor) -> None:
    """out[units] = rows."""
    if rows.dim() == 1:
        out.index_copy_(0, units, rows)
        return
    whole, rest = _split(out)
    if _ends(units, whole, rest):
        rest.copy_(rows[-1, : rest.numel()])
        units, rows = units[:-1], rows[:-1]
    whole.index_copy_(0, units, rows)


def norms(vector: Tensor) -> Tensor:
    """Of each block: √Σ g², in the vector's type."""
    whole, rest = _split(vector)
    found = torch.linalg.vector_norm(whole, dim=1)
    return torch.cat([found, torch.linalg.vector_norm(rest)[None]]) if rest.numel() else found


def _split(vector: Tensor) -> tuple[Tensor, Tensor]:
    """The whole blocks, [blocks, 64], and what is left."""
    blocks = vector.numel() // BLOCK
    return vector[: blocks * BLOCK].view(blocks, BLOCK), vector[blocks * BLOCK :]


def _ends(units: Tensor, whole: Tensor, rest: Tensor) -> bool:
    """Whether the short block is among the units."""
    return bool(rest.numel() and units.numel() and int(units[-1]) == whole.shape[0])


def _padded(rest: Tensor) -> Tensor:
    return pad(rest, (0, BLOCK - rest.numel()))[None]
