"""Figures as a person reads them: SI or binary prefixes, durations, dashes for what is missing."""

from __future__ import annotations

import math
from datetime import UTC, datetime

from laneway.report.scale import SI_PREFIXES

MISSING = "–"


def figure(value: float, digits: int = 4) -> str:
    """A plain figure with ``digits`` significant digits."""
    if not math.isfinite(value):
        return MISSING
    if value != 0 and not 1e-4 <= abs(value) < 1e6:
        return f"{value:.{digits - 1}e}".replace("-", "−")
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:,.{min(decimals, digits)}f}".replace(",", "\u202f").replace("-", "−")


def si(value: float, unit: str = "") -> str:
    """Three digits with an SI prefix: ``12.3 k tokens/s``; the prefix binds to the unit."""
    if not math.isfinite(value):
        return MISSING
    factor, prefix = next(((f, p) for f, p in SI_PREFIXES if abs(value) >= f), (1.0, ""))
    return f"{value / factor:#.3g}".rstrip(".") + ("\u202f" + prefix if prefix else "") + ("\u202f" + unit if unit else "")


def count(value: float) -> str:
    """A whole number with thin spaces between thousands."""
    return f"{value:,.0f}".replace(",", "\u202f") if math.isfinite(value) else MISSING


def binary_unit(largest: float) -> tuple[float, str]:
    """Divisor and name of the binary unit that suits values up to ``largest`` bytes."""
    for power, name in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if largest >= 1024.0**power:
            return 1024.0**power, name
    return 1.0, "B"


def size(value: float) -> str:
    """Bytes with a binary unit."""
    if not math.isfinite(value):
        return MISSING
    divisor, unit = binary_unit(value)
    return f"{value / divisor:.3g}\u202f{unit}" if value / divisor < 1000 else f"{value / divisor:.0f}\u202f{unit}"


def duration(seconds: float) -> str:
    """``2 h 05 min``, ``3 min 07 s`` or ``4.2 s``."""
    if not math.isfinite(seconds):
        return MISSING
    if seconds < 59.95:
        return f"{seconds:.1f}\u202fs"
    whole = round(seconds)
    hours, minutes = whole // 3600, whole % 3600 // 60
    return f"{hours}\u202fh {minutes:02d}\u202fmin" if hours else f"{minutes}\u202fmin {whole % 60:02d}\u202fs"


def moment(seconds: float) -> str:
    """A time of day (seconds since 1970) as UTC, or a dash."""
    if not math.isfinite(seconds) or not 0 < seconds < 4e10:
        return MISSING
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
