"""The host allocator, kept from handing large tensors back to the system after every use.

glibc maps every block of more than a threshold (128 KiB, growing to at most 32 MiB) afresh and returns it when it is freed, so
that a large new tensor costs a page fault for each of its pages on top of the writing. A training step makes and frees the same
sizes over and over; with thresholds above them the pages stay. The price: memory that was freed stays with the process, which on
a machine shared with others may matter.
"""

from __future__ import annotations

import ctypes
import sys

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # malloc.h: M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
LARGEST_MMAP_THRESHOLD = 1 << 30
NEVER_TRIM = 2**31 - 1
DEFAULT = 128 << 10


def keep_freed_memory(on: bool = True) -> bool:
    """Let freed blocks of up to 1 GiB stay with the process; ``on=False`` returns to glibc's defaults.

    Returns:
        Whether the allocator took it: False where it is not glibc's.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    values = {MMAP_THRESHOLD: LARGEST_MMAP_THRESHOLD, TRIM_THRESHOLD: NEVER_TRIM}
    taken = [mallopt(option, value if on else DEFAULT) == 1 for option, value in values.items()]
    return all(taken)
