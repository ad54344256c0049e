"""What a benchmark gives back: flat rows and a summary, as JSON or as rows appended to a committed CSV file.

    JSON: {"bench", "machine", "versions", "rows": [...], "summary": {...}}

A row is one variant under one condition, with units in the names; ``summary`` holds the ratios that documents quote, each with
its low and high. ``tables`` says which CSV file a row belongs to, where a benchmark makes rows of more than one kind.
"""

from __future__ import annotations

import csv
import datetime
import importlib.metadata
import io
import math
import os
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from laneway import __version__
from laneway.core import InputError, LanewayError
from laneway.rundir import replace_file

Row = dict[str, Any]
PACKAGES = ("torch", "numpy", "transformers", "hyper-connections")


@dataclass
class Report:
    """Rows by table (the first is the benchmark's own), and the summary."""

    bench: str
    tables: dict[str, list[Row]]
    summary: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    """What was left out, or how long it was meant to take: one line each."""

    def as_json(self) -> dict[str, Any]:
        """The documented object."""
        rows = [row for table in self.tables.values() for row in table]
        return {
            "bench": self.bench,
            "machine": machine(),
            "versions": versions(),
            "rows": _finite(rows),
            "summary": _finite(self.summary),
            "notes": self.notes,
        }

    def save(self, folder: Path) -> list[Path]:
        """Append every table to ``folder/TABLE.csv``."""
        return [append(folder / f"{name}.csv", rows) for name, rows in self.tables.items() if rows]


def _finite(value: Any) -> Any:
    """``value`` as JSON can hold it: None for what is no finite number (the loss of a run that diverged)."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def versions() -> dict[str, str]:
    """Versions of laneway, python and of the packages that were in play."""
    found = {"laneway": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, str | int]:
    """Processor, its widest vector instructions as torch uses them, cores, memory, accelerator."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return {
        "cpu": _cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1),
        "system": platform.system(),
        "device": str(device) if device else "cpu",
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def stamp() -> Row:
    """The columns that begin every saved row: when, with what, on what."""
    about = machine()
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "laneway": __version__,
        "torch": torch.__version__,
        "cpu": about["cpu"],
        "cores": about["cores"],
        "device": about["device"],
    }


def append(path: Path, rows: list[Row]) -> Path:
    """Append rows to a CSV file, replacing it as a whole, so that a kill leaves the old one.

    Raises:
        LanewayError: the file has other columns, or can't be written.
    """
    first = stamp()
    full = [first | row for row in rows]
    columns = list(full[0])
    if any(list(row) != columns for row in full):
        raise LanewayError(f"{path.name}: rows of different columns can't share a file")
    old = path.read_text("utf-8") if path.is_file() else ""
    if old:
        header = next(csv.reader(io.StringIO(old)))
        if header != columns:
            differing = sorted(set(header) ^ set(columns)) or ["their order"]
            raise LanewayError(f"{path}: its columns differ from the new rows' ({', '.join(differing)}); move the old file away")
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, columns, lineterminator="\n")
    if not old:
        writer.writeheader()
    writer.writerows({key: _cell(value) for key, value in row.items()} for row in full)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, (old + buffer.getvalue()).encode())
    except OSError as error:
        raise LanewayError(f"{path}: can't be written ({error.strerror})") from error
    return path


def _cell(value: Any) -> Any:
    """Six significant digits for measured numbers; nothing for what was not measured or is no finite number."""
    value = _finite(value)
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else value


def source_results() -> Path:
    """``benchmarks/results`` of the source checkout this package runs from.

    Raises:
        InputError: laneway was installed from a wheel; name a folder.
    """
    folder = Path(__file__).resolve().parents[3] / "benchmarks" / "results"
    if not folder.is_dir():
        raise InputError("save", "", "--save DIR", "laneway does not run from a source checkout here, so a folder must be named")
    return folder


def results_folder(given: str) -> Path:
    """The folder ``given`` ("": that of the source checkout), made if need be: looked at before anything is measured.

    Raises:
        InputError: there is no such folder and it can't be made, or it can't be written to.
    """
    if not given:
        return source_results()
    folder = Path(given).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError("save", given, "a folder that exists or can be made", error.strerror) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError("save", given, "a folder that can be written to")
    return folder
