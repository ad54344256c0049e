"""How many parameters a person means."""

from __future__ import annotations

import math
import re

from laneway.core import InputError

ACCEPTED = 'a number of parameters such as "175B", "350M", 175e9 or "175_000_000_000"'
LEAST, MOST = 1e5, 1e15
_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}


def parse_model_size(given: object, field: str = "model_size") -> float:
    """Parameters of a model, from a number or from text with K, M, B (or G) or T behind it.

    Raises:
        InputError: no number, or one that is more likely a slip than a model (``175``: millions or billions?).
    """
    value = _number(given)
    if value is None:
        raise InputError(field, given, ACCEPTED)
    if 0 < value < LEAST:
        meant = given if isinstance(given, str) else f"{given:g}"
        hint = f'write "{meant}B" for billions or "{meant}M" for millions' if value < 1e4 else None
        raise InputError(field, given, ACCEPTED, hint)
    if not LEAST <= value <= MOST:
        raise InputError(field, given, f"{ACCEPTED}, from {LEAST:g} to {MOST:g}")
    return value


def _number(given: object) -> float | None:
    if isinstance(given, bool):
        return None
    if isinstance(given, int | float):
        return float(given) if -1e300 < given < 1e300 else None  # no nan, no inf, no integer too large for a float
    if not isinstance(given, str):
        return None
    found = re.fullmatch(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE]\+?[0-9]{1,2})?)\s*([KMBGT]?)\s*", given.strip(), re.IGNORECASE)
    if found is None or not found[1].isascii():
        return None
    try:
        value = float(found[1]) * _UNITS[found[2].upper()]
    except ValueError:  # an underscore where Python has none
        return None
    return value if math.isfinite(value) else None
