"""Rows of a run's files on a disk that may be full for a while: what finds no room waits, and is written before a later row."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

from laneway.rundir import FULL_DISK, append_row

MOST_WAITING = 1 << 16


class PatientRows:
    """Appends rows to one file, in the order they were given.

    Args:
        path: the file; its folder is made.
        patient: where the disk is full, keep the rows (the newest ``MOST_WAITING``) instead of raising.
    """

    def __init__(self, path: Path, patient: bool = False) -> None:
        self.path, self.patient = path, patient
        self.waiting: deque[dict[str, Any]] = deque(maxlen=MOST_WAITING)

    def append(self, row: dict[str, Any]) -> None:
        """Write the rows that wait, then ``row``. Raises OSError, for a full disk only where it is not ``patient``."""
        self.waiting.append(row)
        try:
            self.flush()
        except OSError as error:
            if not self.patient or error.errno not in FULL_DISK:
                self.waiting.pop()
                raise

    def flush(self) -> None:
        """Write what waits. Raises OSError; what was not written goes on waiting."""
        while self.waiting:
            append_row(self.path, self.waiting[0])
            self.waiting.popleft()
