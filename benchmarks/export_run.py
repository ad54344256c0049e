"""A run directory as CSV files for benchmarks/results: python benchmarks/export_run.py RUN [--name tiny_run] [--results DIR]

NAME.csv           one row a metrics row: its scalars, per-site lists left out
NAME_summary.csv   one row: date, versions, machine, final figures
"""

from __future__ import annotations

import argparse
import csv
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from laneway.core import LanewayError
from laneway.report.runs import Run, load_runs

RESULTS = Path(__file__).resolve().parent / "results"
FIRST = ("step", "loss", "bits_per_byte", "val_loss", "val_bits_per_byte")
LEFT_OUT = ("time",)  # of no use to a curve over steps, and different at every run
DIGITS = 6  # significant ones: more than a picture or a table shows, few enough to keep the file small


def curves(run: Run) -> tuple[list[str], list[dict[str, Any]]]:
    """Columns and rows of NAME.csv."""
    keys = {key for row in run.rows for key, value in row.items() if not isinstance(value, list) and key not in LEFT_OUT}
    columns = [key for key in FIRST if key in keys] + sorted(keys.difference(FIRST))
    return columns, [{key: _short(row.get(key)) for key in columns} for row in run.rows]


def summary(run: Run) -> dict[str, Any]:
    """The row of NAME_summary.csv."""
    started = datetime.fromtimestamp(run.started, UTC).strftime("%Y-%m-%d")
    env, final = run.env, run.final.as_json()
    gains = {key: float(run.curve(key).y.max()) for key in ("gain_forward", "gain_backward") if run.curve(key).drawable}
    machine = {key: env.get(key) for key in ("laneway", "torch", "cpu", "cores")}
    machine |= {"device": env.get("device", {}).get("type"), "threads": env.get("threads")}
    settings = {"residual": run.config["model"]["residual"], "streams": run.config["model"]["streams"]}
    shown = {"date": started, **machine, **settings, **final, **{f"largest_{key}": value for key, value in gains.items()}}
    return {key: _short(value) for key, value in shown.items()}


def _short(value: Any) -> Any:
    """Floats rounded; whole ones (steps, bytes) as the integers they are."""
    if not isinstance(value, float):
        return value
    return int(value) if value.is_integer() else float(f"{value:.{DIGITS}g}")


def write(path: Path, columns: list[str], rows: list[dict[str, Any]]) -> None:
    """Write a CSV file beside its place, then rename it."""
    part = path.with_suffix(".part")
    with part.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    part.replace(path)


def main(args: list[str]) -> int:
    """Export one run; prints the files. Exits with 2 where it is no finished run."""
    parser = argparse.ArgumentParser(description="A run directory as CSV files for benchmarks/results")
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--name", default="tiny_run", help="name of the files")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    asked = parser.parse_args(args)
    try:
        run = load_runs([asked.run])[0]
    except LanewayError as error:
        print(f"export_run: {error}", file=sys.stderr)
        return error.exit_code
    if run.state != "finished":
        print(f"export_run: {asked.run}: the run is {run.state}; accepted: a finished one", file=sys.stderr)
        return 2
    row = summary(run)
    write(asked.results / f"{asked.name}.csv", *curves(run))
    write(asked.results / f"{asked.name}_summary.csv", list(row), [row])
    print(f"wrote {asked.name}.csv and {asked.name}_summary.csv in {asked.results}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
