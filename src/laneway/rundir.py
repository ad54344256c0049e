"""The run directory: the contract between the training loop, which writes it, and everything that reads it. No torch here.

    config.toml            complete and re-runnable
    env.json               machine, versions, command
    metrics/rank0.jsonl    one row a logged step: step, time, then named scalars with their units in the name
    events.jsonl           one row an event: time, step, kind, then what belongs to it
    plan.json              the plan that the run was started with, where there is one
    memory.json            what the memory manager did, where there is one: budget, tier, plans, passes
    checkpoints/step_*/    plain checkpoints
    latest                 name of the newest complete checkpoint

A row that a kill left half-written at the end of a file is skipped; a broken row anywhere else is an error.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import secrets
import time
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from laneway.core import InputError, LanewayError

FULL_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""What an OSError says where a file finds no room: disk, quota or the limit on a file's size."""


@dataclass(frozen=True)
class RunDirectory:
    """Names and readers of the files of one run."""

    path: Path

    @classmethod
    def open(cls, path: str | Path, field: str = "run") -> RunDirectory:
        """An existing run directory; raises InputError where ``path`` is none."""
        path = Path(path)
        if not path.is_dir():
            raise InputError(field, str(path), "a run directory (made by `laneway train`)", "there is no such folder")
        if not (path / "config.toml").is_file():
            raise InputError(field, str(path), "a run directory (made by `laneway train`)", "it holds no config.toml")
        return cls(path)

    @property
    def config(self) -> Path:
        """``config.toml``."""
        return self.path / "config.toml"

    @property
    def env(self) -> Path:
        """``env.json``."""
        return self.path / "env.json"

    @property
    def events(self) -> Path:
        """``events.jsonl``."""
        return self.path / "events.jsonl"

    @property
    def memory(self) -> Path:
        """``memory.json``."""
        return self.path / "memory.json"

    @property
    def plan(self) -> Path:
        """``plan.json``."""
        return self.path / "plan.json"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def latest(self) -> Path:
        """Marker file that names the newest complete checkpoint."""
        return self.path / "latest"

    def metrics(self, rank: int = 0) -> Path:
        """Metrics file of one rank."""
        return self.path / "metrics" / f"rank{rank}.jsonl"

    def read_config(self) -> dict[str, Any]:
        """The run's configuration as nested dictionaries; raises LanewayError where the file is no TOML."""
        try:
            return tomllib.loads(self.config.read_text("utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise LanewayError(f"{self.config}: not TOML ({error})") from error

    def read_env(self) -> dict[str, Any]:
        """Machine, versions and command of the run; empty where none was written. Raises LanewayError where it is no JSON."""
        try:
            return json.loads(self.env.read_text("utf-8")) if self.env.is_file() else {}
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise LanewayError(f"{self.env}: not JSON ({error})") from error

    def read_memory(self) -> dict[str, Any] | None:
        """What the memory manager did; None where nothing was written, or what there is is no JSON object (half-written, say)."""
        try:
            found = json.loads(self.memory.read_text("utf-8")) if self.memory.is_file() else None
        except (ValueError, RecursionError):  # no JSON, no UTF-8, an integer of thousands of digits, nested without end
            return None
        return found if isinstance(found, dict) else None

    def read_metrics(self, rank: int = 0) -> list[dict[str, Any]]:
        """Rows of one rank, by step; where a resume wrote a step again, the later row counts."""
        path = self.metrics(rank)
        by_step: dict[Any, dict[str, Any]] = {}
        for row in read_rows(path):
            if not math.isfinite(number(row.get("step"))):
                raise LanewayError(f"{path}: a row without a step: {json.dumps(row)[:80]}")
            by_step[row["step"]] = row
        return [by_step[step] for step in sorted(by_step)]

    def read_events(self) -> list[dict[str, Any]]:
        """All events in the order they were written."""
        return list(read_rows(self.events))


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a JSON-lines file; nothing where there is no file."""
    if not path.is_file():
        return
    # Not splitlines(): it also cuts at U+2028 and U+0085, which JSON leaves as they are inside strings.
    lines = path.read_text("utf-8", errors="replace").removesuffix("\n").split("\n")
    for index, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise json.JSONDecodeError("no object", line, 0)
            yield row
        except json.JSONDecodeError as error:
            if index == len(lines):
                return
            raise LanewayError(f"{path}, line {index}: not a JSON row ({error})") from error


def number(value: Any) -> float:
    """``value`` as a float; NaN for what is no finite number (null, text, a flag, an infinity)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value) if math.isfinite(value) else math.nan
    except OverflowError:  # an integer beyond the range of a float
        return math.nan


def column(rows: Iterable[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Steps and values of one scalar over the rows that have it; a value that is no finite number comes as NaN."""
    found = [(row["step"], number(row[key])) for row in rows if key in row]
    return [step for step, _ in found], [value for _, value in found]


def site_columns(rows: Iterable[dict[str, Any]], key: str) -> tuple[list[int], list[list[float]]]:
    """Steps and per-site values (one a site, by depth) of a list over the rows that have it, all as long as the last one."""
    found = [(row["step"], [number(item) for item in row[key]]) for row in rows if isinstance(row.get(key), list)]
    depth = len(found[-1][1]) if found else 0
    kept = [(step, sites) for step, sites in found if depth and len(sites) == depth]
    return [step for step, _ in kept], [sites for _, sites in kept]


def append_row(path: Path, row: dict[str, Any]) -> None:
    """Append one row, after removing what a kill may have left half-written at the end of the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        _drop_torn_tail(file)
        file.write(json.dumps(row, ensure_ascii=False, default=float).encode() + b"\n")


def _drop_torn_tail(file: BinaryIO) -> None:
    """Cut the file after its last newline."""
    end = file.seek(0, os.SEEK_END)
    keep = end
    while keep > 0:
        start = max(0, keep - 4096)
        file.seek(start)
        cut = file.read(keep - start).rfind(b"\n")
        if cut >= 0:
            keep = start + cut + 1
            break
        keep = start
    if keep < end:
        file.truncate(keep)


def event_row(kind: str, step: int, **fields: Any) -> dict[str, Any]:
    """A row of ``events.jsonl``, with the time of day in seconds."""
    return {"time": time.time(), "step": step, "kind": kind, **fields}


def append_event(run: RunDirectory, kind: str, step: int, **fields: Any) -> None:
    """Append one event with the time of day in seconds."""
    append_row(run.events, event_row(kind, step, **fields))


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and flush it to the disk. Raises OSError."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, data: bytes) -> None:
    """Write a file as a whole, with a new file's permissions: beside it, onto the disk, then renamed over the old one.

    Raises:
        OSError: no folder, a full disk, …; the old file is as it was, and nothing is left beside it.
    """
    beside = path.with_name(f".tmp_{path.name}.{secrets.token_hex(4)}")  # two writers at once must not share it
    try:
        write_synced(beside, data)
        beside.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise
