"""``laneway bench planner``: the cost model against published measurements, and what it says of the claims.

``planner_rows`` (iteration times in the published columns) · ``planner_transfer`` (fitted here, tested there) ·
``planner_published`` (tables of papers and projects) · ``planner_claims`` (simulated: synchronisation, exposed communication,
bytes, sweeps) · ``planner_machines`` (whose machines). Nothing is timed here: rows are the same on every machine.

With ``--rows FILE.csv`` only that file is evaluated. Shares are shares: a mape of 0.12 is 12 per cent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from laneway.bench import planner_claims as claims
from laneway.bench.planner_machines import MEGATRON_ERA
from laneway.bench.planner_published import compare
from laneway.bench.planner_rows import Measured, evaluate, read, score
from laneway.bench.planner_transfer import transfer
from laneway.bench.rows import Report, Row
from laneway.cluster.costs import Calibration
from laneway.core import InputError

MAPE, SPEARMAN, REGRET = 0.12, 0.9, 0.02
"""Targets per model size of the published multi-node rows: at most, at least, at most."""
SYNC_GAIN = 3.9
"""Claimed speed-up of gradient synchronisation."""
SIZES = tuple(2**power for power in range(14, 31))
BANDWIDTHS = (0.35, 1.4, 5.6, 11.25, 45.0)
"""GB/s a device between racks: 25 and 100 Gb/s a node of eight, and 400 Gb/s a device at 8:1, 4:1 and 1:1."""


@dataclass(frozen=True)
class PlannerOptions:
    """What is evaluated."""

    rows: str = ""
    """A file with the published columns; empty for the published rows and all the rest."""
    calibration: str = ""
    """A probe file; empty for the defaults with the attention of that time."""
    quick: bool = False

    def check(self) -> None:
        """Raise InputError where a file is not there, or the checkout with the published rows isn't."""
        for name, given in (("rows", self.rows), ("calibration", self.calibration)):
            if given and not Path(given).expanduser().is_file():
                raise InputError(name, given, "a file that exists")
        if not self.rows:
            published("multi_node")

    def constants(self) -> Calibration:
        """Calibration of the measured rows."""
        return Calibration.load(self.calibration) if self.calibration else MEGATRON_ERA


def published(name: str) -> Path:
    """A file of published rows in the source checkout.

    Raises:
        InputError: laneway runs from a wheel, which has no data.
    """
    path = Path(__file__).resolve().parents[3] / "benchmarks" / "data" / "vtrain" / f"{name}.csv"
    if not path.is_file():
        raise InputError("rows", "", "--rows FILE.csv", "laneway does not run from a source checkout here, which holds the rows")
    return path


def quick(options: PlannerOptions) -> PlannerOptions:
    """At most a minute on two cores: no constants are fitted anew, every third message size."""
    return replace(options, quick=True)


def run(options: PlannerOptions, progress: Callable[[str], None] = lambda line: None) -> Report:
    """Evaluate; raises InputError naming line and column where a file is malformed."""
    options.check()
    notes: list[str] = []
    if options.rows:
        path = Path(options.rows).expanduser()
        rows, found = evaluate(read(path), path.name, options.constants(), notes.append)
        return Report("planner", {"planner": rows}, dict(found), notes)
    multi, single = read(published("multi_node")), read(published("single_node"))
    rows, scores = evaluate(multi, "multi_node.csv", options.constants(), notes.append)
    progress(f"{len(rows)} rows on several nodes")
    _, inside = evaluate(single, "single_node.csv", options.constants(), notes.append)
    progress(f"{len(single)} rows in one node")
    tables = {"planner": rows, "planner_scores": [*_scores("multi_node.csv", scores), *_scores("single_node.csv", inside)]}
    tables["planner_scores"] += _whole(multi, rows)
    if not options.quick:
        tables["planner_transfer"] = transfer(multi, single, progress)
    tables["planner_published"] = compare()
    tables["planner_sync"] = claims.gradient_sync()
    tables["planner_exposed"] = claims.exposed()
    tables["planner_bytes"] = claims.cross_node_bytes()
    tables["planner_sweep"] = claims.sweep(SIZES[::3] if options.quick else SIZES, BANDWIDTHS)
    summary, lines = judge(scores, tables)
    notes += [*lines, "single_node.csv: scores only; --rows shows its rows"]
    if options.quick:
        notes.append("quick: ≤ 60 s on 2 cores; nothing fitted anew, fewer message sizes. Leave --quick out for the rest")
    return Report("planner", tables, summary, notes)


def _scores(file: str, found: Mapping[str, Mapping[str, float]]) -> list[Row]:
    return [{"file": file, "size": size, **figures} for size, figures in found.items()]


def _whole(measured: Sequence[Measured], rows: Sequence[Row]) -> list[Row]:
    """Scores of a file as one: errors over all rows, ranks and regret over sizes together."""
    together = [replace(row, size="all") for row in measured]
    return _scores("multi_node.csv", score(together, [row["predicted_ms"] / 1e3 for row in rows]))


def judge(scores: Mapping[str, Mapping[str, float]], tables: Mapping[str, Sequence[Row]]) -> tuple[dict[str, Any], list[str]]:
    """The summary, and a line for each target: pass, or miss with its figures."""
    summary: dict[str, Any] = {size: dict(figures) for size, figures in scores.items()}
    lines = []
    for name, least, target in (("mape", False, MAPE), ("spearman", True, SPEARMAN), ("regret", False, REGRET)):
        values = {size: figures[name] for size, figures in scores.items()}
        good = all(value >= target if least else value <= target for value in values.values())
        told = ", ".join(f"{size} {value:.3f}" for size, value in values.items())
        lines.append(f"{'pass' if good else 'miss'}: {name} {'≥' if least else '≤'} {target:g} per model size: {told}")
    for table in dict.fromkeys(row["table"] for row in tables["planner_published"]):
        errors = [abs(row["error"]) for row in tables["planner_published"] if row["table"] == table]
        summary[table] = {"rows": len(errors), "mape": sum(errors) / len(errors), "worst": max(errors)}
    gains = {row["network"]: row["over_chosen"] for row in tables["planner_sync"] if row["scheme"] == "ring_worst"}
    ordered = {row["network"]: row["over_chosen"] for row in tables["planner_sync"] if row["scheme"] == "ring"}
    summary["gradient sync"] = {
        **{f"worst ring over chosen, {network}": gain for network, gain in gains.items()},
        **{f"ordered ring over chosen, {network}": gain for network, gain in ordered.items()},
    }
    good = min(gains.values()) >= SYNC_GAIN
    verdict = "pass" if good else "miss"
    lines.append(f"{verdict}: sync against the badly ordered ring ≥ {SYNC_GAIN} times: {min(gains.values()):.1f} or more")
    return summary | _exposed(tables["planner_exposed"]), lines


def _exposed(rows: Sequence[Row]) -> dict[str, Any]:
    by = {row["layout"]: row for row in rows}
    planned = by["planned"]
    return {
        f"planned against {name}": {
            "exposed_saved": 1 - planned["exposed_s"] / row["exposed_s"],
            "cross_node_saved": 1 - planned["cross_node_gb"] / row["cross_node_gb"],
            "kwh_per_token_saved": 1 - planned["kwh_per_token"] / row["kwh_per_token"],
        }
        for name, row in by.items()
        if name != "planned"
    }
