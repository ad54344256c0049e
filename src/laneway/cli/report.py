"""``laneway report RUN [RUN …]``: one HTML file that shows the runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import tyro

from laneway.cli._parse import parse
from laneway.report import write_report


def report(
    runs: tyro.conf.Positional[tuple[Path, ...]],
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None,
    json: bool = False,
) -> tuple[tuple[Path, ...], Path | None, bool]:
    """Draw one or more runs as a single HTML file that needs no network; several runs are compared side by side.

    Args:
        runs: Run directories.
        out: The file. Default: report.html in the run directory, or in the working directory for several runs.
        json: Print one JSON object instead of a line.
    """
    return runs, out, json


def run(args: list[str]) -> int:
    """Entry of the verb."""
    paths, out, as_json = parse(report, args, prog="laneway report", config=(tyro.conf.FlagCreatePairsOff,))
    target, runs = write_report(paths, out)
    if as_json:
        figures = [{"name": item.name, "path": str(item.path), "state": item.state, **item.final.as_json()} for item in runs]
        print(json.dumps({"out": str(target), "bytes": target.stat().st_size, "runs": figures}))
    else:
        print(f"wrote {target} ({target.stat().st_size / 1024:.0f} KiB, {len(runs)} run{'s' if len(runs) > 1 else ''})")
    return 0
