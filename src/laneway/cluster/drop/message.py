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
from laneway.cluster.drop.values import narrow, widen

__all__ = ["Kept", "decode", "encode", "poison", "poisoned"]

_WIRE = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}


@dataclass(frozen=True)
class Kept:
    """Entries that travel.

    Attributes:
        places: int64 [s], ascending; None: all, in order.
        values: fp32 [s], as the receiver reads them.
    """

    places: Tensor | None
    values: Tensor

    def add_to(self, total: Tensor, factor: int = 1) -> None:
        """total[places] += factor · values, in total's precision; no place comes twice."""
        values = self.values.to(total.dtype)
        if self.places is None:
            total.add_(values, alpha=factor)
        else:
            total.index_add_(0, self.places, values, alpha=factor)

    def write_to(self, out: Tensor) -> None:
        """The vector that these entries stand for: zero elsewhere."""
        if self.places is None:
            out.copy_(self.values)
        else:
            out.zero_().index_copy_(0, self.places, self.values)


def encode(vector: Tensor, units: Tensor | None, form: Format, out: Tensor) -> Kept:
    """Write the message.

    Args:
        vector: finite fp32 [form.entries].
        units: the units that are kept, int64, ascending, at most form.kept; None: all (dense).
        form: of the message.
        out: uint8 [form.nbytes].

    Returns: what the receivers will read.
    """
    places = None if units is None else _places(units, form)
    chosen = vector if places is None else vector.index_select(0, places)
    travelled, scales = narrow(chosen, form.wire)
    fields = _fields(form, out)
    fields["values"].zero_()[: travelled.numel()] = travelled
    if scales is not None:
        fields["scales"].fill_(1)[: scales.numel()] = scales
    if form.coding == "index" and units is not None:
        fields["indices"].fill_(-1)[: units.numel()] = units.to(torch.int32)
    elif form.coding == "mask" and units is not None:
        flags = torch.zeros(form.units, dtype=torch.bool, device=vector.device)
        fields["mask"].copy_(bits.pack(flags.index_fill_(0, units, True)))
    return Kept(places, widen(travelled, scales))


def decode(message: Tensor, form: Format) -> Kept:
    """Read a message that is not poisoned."""
    fields = _fields(form, message)
    places = None
    if form.coding == "index":
        indices = fields["indices"]
        places = _places(indices[indices >= 0].long(), form)
    elif form.coding == "mask":
        places = _places(bits.nonzero(bits.unpack(fields["mask"], form.units)), form)
    used = form.slots if places is None else places.numel()
    return Kept(places, widen(fields["values"], fields.get("scales"))[:used])


def poison(out: Tensor) -> None:
    """Make ``out`` the message of a vector that is not finite."""
    out.fill_(255)


def poisoned(message: Tensor, form: Format) -> bool:
    """Whether the sender's vector was not finite."""
    fields = _fields(form, message)
    first = fields["scales"][0] == 255 if "scales" in fields else fields["values"][0].isnan()
    return bool(first)


def _places(units: Tensor, form: Format) -> Tensor:
    """The entries of the units; the last unit may be short."""
    if form.unit == 1:
        return units
    places = (units[:, None] * BLOCK + torch.arange(BLOCK, device=units.device)).view(-1)
    return places[: _used(units, form)]


def _used(units: Tensor, form: Format) -> int:
    short = form.units * form.unit - form.entries
    last = units.numel() and int(units[-1]) == form.units - 1
    return units.numel() * form.unit - (short if last else 0)


def _fields(form: Format, message: Tensor) -> dict[str, Tensor]:
    sizes = [form.index_bytes, form.value_bytes, form.scale_bytes, form.mask_bytes]
    indices, values, scales, mask = message.split(sizes)
    found = {"indices": indices.view(torch.int32), "values": values.view(_WIRE[form.wire]), "mask": mask}
    return found | ({"scales": scales} if form.wire == "int8" else {})
