"""Numbers in tables: a key names the unit; what is written is read back to the last bit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

from laneway.core import InputError, nearest

__all__ = ["Quantity", "keys_of", "known_keys", "number", "read_all", "scaled"]


class Quantity(NamedTuple):
    """A number that a table may hold in a convenient unit, or in its SI unit where the convenient one would lose a bit.

    Attributes:
        name: the field that holds it.
        key: the key with the convenient unit, which is 10^power SI units.
        plain: the key with the SI unit.
        above: whether 0 is refused.
    """

    name: str
    key: str
    power: int
    plain: str
    above: bool = False

    def written(self, value: float) -> dict[str, float]:
        """The entry of a table."""
        convenient = scaled(value, -self.power)
        exact = math.isfinite(convenient) and scaled(convenient, self.power) == value
        return {self.key: convenient} if exact else {self.plain: float(value)}


def keys_of(quantities: Sequence[Quantity]) -> list[str]:
    """All keys that these may stand under."""
    return [key for quantity in quantities for key in (quantity.key, quantity.plain)]


def read_all(field: str, table: Mapping[str, Any], quantities: Sequence[Quantity]) -> dict[str, float]:
    """The quantities that a table holds, by field name. Raises InputError: no number, or given twice."""
    found: dict[str, float] = {}
    for name, key, power, plain, above in quantities:
        if key in table and plain in table:
            raise InputError(f"{field}.{plain}", table[plain], f"{key} or {plain}, not both")
        if key in table:
            value = scaled(number(f"{field}.{key}", table[key], above=above), power)
            found[name] = number(f"{field}.{key}", value, above=above)
        elif plain in table:
            found[name] = number(f"{field}.{plain}", table[plain], above=above)
    return found


def scaled(value: float, power: int) -> float:
    """Times 10^power, correctly rounded."""
    return float(Decimal(repr(float(value))).scaleb(power))


def number(field: str, given: object, least: float = 0.0, above: bool = False) -> float:
    """A finite number ≥ `least` (or more than it); raises InputError."""
    try:
        value = float(given) if isinstance(given, int | float) and not isinstance(given, bool) else math.nan
    except OverflowError:
        value = math.inf
    if not least <= value < math.inf or (above and value == least):
        raise InputError(field, given, f"a number {'>' if above else '≥'} {least:g}")
    return value


def known_keys(field: str, table: object, keys: Iterable[str]) -> None:
    """Raise InputError, with the accepted keys, for a key that isn't among them, or for what isn't a table."""
    keys = list(keys)
    if not isinstance(table, Mapping):
        raise InputError(field, table, f"a table with the keys {', '.join(keys)}")
    for key in table:
        if key not in keys:
            close = nearest(str(key), keys)
            raise InputError(f"{field}.{key}", table[key], ", ".join(keys), f"did you mean {close}?" if close else None)
