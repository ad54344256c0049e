"""Kept values as one vector of bytes of a known size, and back: see sizes.py for what lies where.

A vector with a value that is no finite number can't be summed: its message is ``poison``, all bits set, which every coding reads
as no number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from laneway.cluster.drop import bits
from laneway.cluster.drop.sizes import BLOCK, Format
from laneway.cluster.drop.units import add_rows, put_rows, take_rows
from laneway.cluster.drop.values import MOST, narrow, widen

__all__ = ["Kept", "decode", "encode", "poison", "poisoned"]

_WIRE = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}


@dataclass(frozen=True)
class Kept:
    """Entries that travel.

    Attributes:
        units: int64 [s], ascending; None: all, in order.
        values: fp32 as the receiver reads them: [s] of single entries, [s, 64] of blocks, [entries] of all.
    """

    units: Tensor | None
    values: Tensor

    def add_to(self, total: Tensor, factor: int = 1) -> None:
        """total[units] += factor · values, in total's precision; no unit comes twice."""
        values = self.values.to(total.dtype)
        if self.units is None:
            total.add_(values, alpha=factor)
        else:
            add_rows(total, self.units, values, factor)

    def write_to(self, out: Tensor) -> None:
        """The vector that these entries stand for: zero elsewhere."""
        if self.units is None:
            out.copy_(self.values)
        else:
            put_rows(out.zero_(), self.units, self.values)


def encode(vector: Tensor, units: Tensor | None, form: Format, out: Tensor) -> Kept:
    """Write the message.

    Args:
        vector: finite [form.entries], fp32 or fp64; what is beyond fp32 travels as its largest number.
        units: the units that are kept, int64, ascending, at most form.kept; None: all (dense).
        form: of the message.
        out: uint8 [form.nbytes].

    Returns: what the receivers will read.
    """
    chosen = vector if units is None else take_rows(vector, units, form.unit)
    if chosen.dtype != torch.float32:
        chosen = chosen.clamp(-MOST, MOST).float()
    travelled, scales = narrow(chosen.view(-1), form.wire)
    fields = _fields(form, out)
    _fill(fields["values"], travelled, 0)
    if scales is not None:
        _fill(fields["scales"], scales, 1)
    if form.coding == "index" and units is not None:
        _fill(fields["indices"], units, -1)
    elif form.coding == "mask" and units is not None:
        flags = torch.zeros(form.units, dtype=torch.bool, device=vector.device)
        fields["mask"].copy_(bits.pack(flags.index_fill_(0, units, True)))
    return Kept(units, widen(travelled, scales).view(chosen.shape))


def decode(message: Tensor, form: Format) -> Kept:
    """Read a message that is not poisoned."""
    fields = _fields(form, message)
    units = None
    if form.coding == "index":
        indices = fields["indices"]
        units = indices[indices >= 0].long()
    elif form.coding == "mask":
        units = bits.nonzero(bits.unpack(fields["mask"], form.units))
    used = form.slots if units is None else units.numel() * form.unit
    values = widen(fields["values"][:used], fields["scales"][: -(-used // BLOCK)] if "scales" in fields else None)
    return Kept(units, values if units is None or form.unit == 1 else values.view(-1, form.unit))


def poison(out: Tensor) -> None:
    """Make ``out`` the message of a vector that is not finite."""
    out.fill_(255)


def poisoned(message: Tensor, form: Format) -> bool:
    """Whether the sender's vector was not finite."""
    fields = _fields(form, message)
    first = fields["scales"][0] == 255 if "scales" in fields else fields["values"][0].isnan()
    return bool(first)


def _fill(field: Tensor, given: Tensor, rest: int) -> None:
    """The field's first entries are the given ones, the others ``rest``."""
    field[: given.numel()].copy_(given)
    field[given.numel() :].fill_(rest)


def _fields(form: Format, message: Tensor) -> dict[str, Tensor]:
    sizes = [form.index_bytes, form.value_bytes, form.scale_bytes, form.mask_bytes]
    indices, values, scales, mask = message.split(sizes)
    found = {"indices": indices.view(torch.int32), "values": values.view(_WIRE[form.wire]), "mask": mask}
    return found | ({"scales": scales} if form.wire == "int8" else {})
