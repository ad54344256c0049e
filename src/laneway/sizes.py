"""Sizes that a person writes, and how large the host's share of a tiered memory should be. No torch here.

Both the memory manager and the doctor, which don't know each other, need these.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

from laneway.core import InputError

UNITS = {"": 1, "b": 1} | {
    f"{prefix}{ending}": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for ending, base in (("b", 1000), ("ib", 1024), ("i", 1024))
}
BYTES_ACCEPTED = 'a number of bytes such as "1.5GiB" (1024³), "800MB" (1000²) or 1073741824'

HOST_BUFFER_LEAST, HOST_BUFFER_COMFORTABLE = 2.5, 3.0
LARGEST_HOST_BUFFER_RATIO = 0.95
DEFAULT_HOST_BUFFER_RATIO = 0.5
AUTO_BUDGET = 0.82
GIB = 2**30


def parse_bytes(field: str, given: object) -> int:
    """A size in bytes from text or from an integer.

    Units are spelled in any case: B, kB, MB, GB, TB are powers of 1000; KiB, MiB, GiB, TiB (or Ki, Mi, Gi, Ti, as Kubernetes
    writes them) powers of 1024. A lone K, M, G or T is refused, since programs disagree on what it means. A part of a byte is
    dropped.

    Args:
        field: what an error names, such as ``memory.budget`` or the variable that was read.
        given: the text, or an integer ≥ 0.

    Raises:
        InputError: not a size.
    """
    if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
        return given
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*)\s*", given) if isinstance(given, str) else None
    unit = found[2] if found else ""
    if found is None or unit.lower() not in UNITS:
        lone = unit.upper() in ("K", "M", "G", "T") and len(unit) == 1
        raise InputError(
            field, given, BYTES_ACCEPTED, f"write {unit.upper()}iB (1024) or {unit.upper()}B (1000)" if lone else None
        )
    return math.floor(Fraction(found[1]) * UNITS[unit.lower()])


def parse_fraction(field: str, given: object, most: float = 1.0) -> float:
    """A number from 0 to ``most`` from text or from a number; raises InputError."""
    try:
        value = float(given) if isinstance(given, str | int | float) and not isinstance(given, bool) else math.nan
    except (ValueError, OverflowError):
        value = math.nan
    if not 0 <= value <= most:
        raise InputError(field, given, f"a number from 0 to {most:g}")
    return value


def budget_bytes(field: str, given: object, capacity: int) -> int:
    """A budget in bytes: ``auto`` is 82 % of the capacity, anything else a size.

    Raises:
        InputError: neither, or nothing at all, or more than the capacity.
    """
    if given == "auto":
        return int(AUTO_BUDGET * capacity)
    size = parse_bytes(field, given)
    if size == 0:
        raise InputError(field, given, f"auto, or {BYTES_ACCEPTED}", "to turn it off, leave it empty")
    if size > capacity:
        raise InputError(field, given, f"at most what the device holds, {capacity} bytes, or auto")
    return size


def check_host_buffer(host_bytes: float, ratio: float, device_bytes: float) -> str | None:
    """What is wrong with the size of the host buffer, or None.

    The rule: the buffer should hold 2.5 to 3 times the device memory that it serves, so that optimizer state, gradients and the
    activations of one step fit beside each other. A larger one is no fault: the ratio is a bound, not a reservation.

    Args:
        host_bytes: memory of the host (of the container, where that is limited).
        ratio: share of it that the buffer may take.
        device_bytes: memory of all accelerators of this host, or the budget where the device is the host itself.
    """
    buffer, least = host_bytes * ratio, HOST_BUFFER_LEAST * device_bytes
    if buffer >= least:
        return None
    told = f"the host buffer ({ratio:g} of {host_bytes / GIB:.1f} GiB = {buffer / GIB:.1f} GiB) holds "
    told += f"{buffer / device_bytes:.1f} times the device memory of {device_bytes / GIB:.1f} GiB"
    return f"{told}; {HOST_BUFFER_LEAST:g} to {HOST_BUFFER_COMFORTABLE:g} times are advised"


def host_buffer_advice(host_bytes: float, device_bytes: float) -> str:
    """What to do about a host buffer that ``check_host_buffer`` found too small: the ratio that would do, or more memory."""
    wanted = HOST_BUFFER_LEAST * device_bytes
    ratio = math.ceil(100 * wanted / host_bytes) / 100
    if ratio <= LARGEST_HOST_BUFFER_RATIO:
        return f"at least {ratio:g}"
    host = wanted / LARGEST_HOST_BUFFER_RATIO / GIB
    return f"no ratio does here: a host with {host:.1f} GiB would; or a smaller budget; or the disk as the tier"
