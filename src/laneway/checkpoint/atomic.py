"""Files and folders that are either all there or not there at all, also after a kill or a power cut.

A folder is written beside its final name, every file in it is flushed to the disk (``fsync``), then the folder itself, and only
then it is renamed. A folder cannot be renamed over another in one step on every file system, so an older one is first moved
aside to ``.old_NAME``; readers use ``locate``, which takes the one that was moved aside for as long as the new one is not there.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from laneway.rundir import write_synced

__all__ = ["aside", "explain", "locate", "settle", "swap_in", "sync", "temporary", "write_synced"]

_FULL = {errno.ENOSPC: "no space left on the disk", errno.EDQUOT: "the disk quota is used up"}


def explain(error: OSError, folder: Path) -> str:
    """One line a person can act on: what went wrong, where, and how much space is left where space was the problem."""
    where = error.filename or folder
    if error.errno in _FULL:
        try:
            free = f" ({shutil.disk_usage(_existing(folder)).free / 2**20:.1f} MiB free)"
        except OSError:
            free = ""  # the disk itself is gone; what failed first is the message that counts
        return f"{_FULL[error.errno]} of {where}{free}"
    if error.errno == errno.EFBIG:
        return f"the file would be larger than this process may write (ulimit -f) or the file system allows: {where}"
    return f"{error.strerror or error}: {where}"


def _existing(path: Path) -> Path:
    """The nearest folder above ``path`` that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def sync(path: Path) -> None:
    """Flush one file or folder to the disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def temporary(target: Path) -> Path:
    """Where ``target`` is written before it is complete."""
    return target.with_name(f".tmp_{target.name}")


def aside(target: Path) -> Path:
    """Where an older ``target`` waits while a new one takes its place."""
    return target.with_name(f".old_{target.name}")


def locate(target: Path) -> Path:
    """The folder to read: ``target``, or the older one where a kill came between the two renames of ``swap_in``."""
    return aside(target) if not target.exists() and aside(target).exists() else target


def settle(target: Path) -> None:
    """Finish or undo what a kill left half-done: bring back a folder that was moved aside, drop one that was replaced."""
    if not aside(target).exists():
        return
    if target.exists():
        shutil.rmtree(aside(target))
    else:
        aside(target).rename(target)


def swap_in(target: Path) -> None:
    """Give the complete folder ``temporary(target)`` its final name, in the place of an older one. Raises OSError."""
    sync(temporary(target))
    if target.exists():
        target.rename(aside(target))
    try:
        temporary(target).rename(target)
    except OSError:
        if aside(target).exists():
            aside(target).rename(target)
        raise
    sync(target.parent)
    if aside(target).exists():
        shutil.rmtree(aside(target))
