"""How many bytes a message with dropped entries has: every size is known before the call, so none is exchanged. No torch here.

m entries, of which k are kept, at b bytes a value (fp32 4, bf16 2, int8 1 and one byte of scale for 64 values):

* entries with a bit mask: k·b + ⌈m / 8⌉
* entries with int32 indices: k·b + 4k
* blocks of 64 with a bit mask, K of B = ⌈m / 64⌉ kept: 64·K·b + ⌈B / 8⌉
* blocks of 64 with int32 indices: 64·K·b + 4K
* dense: m·b, taken wherever the others are no smaller
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from laneway.cluster.reduce.scheme import WIRES
from laneway.core import InputError, choice, positive_int

__all__ = ["BLOCK", "UNITS", "Format", "drop_for_saving", "exchange_bytes", "message_format", "parts"]

BLOCK = 64
"""Entries of a block, and values that share a scale of int8."""
UNITS = ("auto", "entries", "blocks")
"""What is kept or dropped as one; auto: single entries up to a share of `BLOCKS_FROM`, blocks from there on."""
BLOCKS_FROM = 0.8
_VALUE = {"fp32": 4, "bf16": 2, "int8": 1}


@dataclass(frozen=True)
class Format:
    """A message for ``entries`` entries: [indices int32 | values | scales | mask], without those that its coding lacks.

    Attributes:
        entries: of the vector that the message stands for.
        unit: entries of a unit, 1 or `BLOCK`.
        kept: units that it has room for.
        coding: dense, mask or index.
        wire: one of `WIRES`.
    """

    entries: int
    unit: int
    kept: int
    coding: str
    wire: str

    @property
    def units(self) -> int:
        """Units of the vector; the last may be short."""
        return -(-self.entries // self.unit)

    @property
    def slots(self) -> int:
        """Values in the message."""
        return self.entries if self.coding == "dense" else self.kept * self.unit

    @property
    def index_bytes(self) -> int:
        """Of the indices."""
        return 4 * self.kept if self.coding == "index" else 0

    @property
    def value_bytes(self) -> int:
        """Of the values."""
        return self.slots * _VALUE[self.wire]

    @property
    def scale_bytes(self) -> int:
        """Of int8's scales."""
        return -(-self.slots // BLOCK) if self.wire == "int8" else 0

    @property
    def mask_bytes(self) -> int:
        """Of the bit mask."""
        return -(-self.units // 8) if self.coding == "mask" else 0

    @property
    def nbytes(self) -> int:
        """Of the message."""
        return self.index_bytes + self.value_bytes + self.scale_bytes + self.mask_bytes


def message_format(entries: int, drop: float, wire: str = "fp32", unit: str = "auto") -> Format:
    """The message that needs fewest bytes.

    Args:
        entries: of the vector.
        drop: share of its units that stays at home; at least one unit is kept.
        wire: one of `WIRES`.
        unit: one of `UNITS`.

    Raises:
        InputError: a value out of range.
    """
    positive_int("entries", entries, 0)
    choice("wire", wire, WIRES)
    choice("unit", unit, UNITS)
    size = BLOCK if unit == "blocks" or (unit == "auto" and check_drop(drop) >= BLOCKS_FROM) else 1
    units = -(-entries // size)
    kept = min(units, max(1, math.ceil((1 - check_drop(drop)) * units - 1e-9)))
    dense = Format(entries, size, units, "dense", wire)
    if entries == 0:
        return dense
    others = [Format(entries, size, kept, coding, wire) for coding in ("mask", "index")]
    return min(dense, *others, key=lambda form: form.nbytes)


def check_drop(drop: float, field: str = "drop") -> float:
    """The share, if it is one.

    Raises:
        InputError: no number from 0 to below 1.
    """
    if isinstance(drop, bool) or not isinstance(drop, int | float) or not 0 <= drop < 1:
        raise InputError(field, drop, "a share from 0 to below 1")
    return float(drop)


def drop_for_saving(saving: float, wire: str = "fp32") -> float:
    """The share of single entries to drop so that messages with a bit mask have ``saving`` fewer bytes than dense ones.

    1 − saving = (1 − drop) + 1 / 8b, so drop = saving + 1 / 8b with b bytes a value: it breaks even at 1 / 8b.

    Raises:
        InputError: a share that no mask of single entries can save.
    """
    b = _VALUE[choice("wire", wire, WIRES)] + (1 / BLOCK if wire == "int8" else 0)
    most = 1 - 1 / (8 * b)
    if not 0 <= saving < most:
        raise InputError("saving", saving, f"a share from 0 to below {most:g} (what the mask of {wire} leaves)")
    return saving + 1 / (8 * b)


def parts(entries: int, members: int) -> list[tuple[int, int]]:
    """Which run of a vector each member sums: whole blocks, as even as they come; later members may have none.

    Raises:
        InputError: entries < 0 or members < 1.
    """
    blocks = -(-positive_int("entries", entries, 0) // BLOCK)
    positive_int("members", members)
    bounds = [min(entries, BLOCK * (blocks * place // members)) for place in range(members + 1)]
    return list(pairwise(bounds))


def exchange_bytes(entries: int, members: int, place: int, drop: float, wire: str = "fp32", unit: str = "auto") -> int:
    """Bytes that the member at ``place`` sends in one all-reduce: a message to the owner of each part, then its own to all.

    Near 2 (members − 1) / members × the bytes of a message for all entries.

    Raises:
        InputError: a value out of range.
    """
    formats = [message_format(stop - start, drop, wire, unit) for start, stop in parts(entries, members)]
    return sum(f.nbytes for q, f in enumerate(formats) if q != place) + (members - 1) * formats[place].nbytes
