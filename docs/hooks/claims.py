"""The table of what others state beside what was measured here: figures of others from benchmarks/data/claims, ours from rows."""

from __future__ import annotations

import ast
import csv
from pathlib import Path
from typing import Any

import measured

CLAIMS = measured.ROOT / "benchmarks" / "data" / "claims"
NOT_YET = "not measured yet"


def claims(results: Path, name: str) -> str:
    """A Markdown table of ``benchmarks/data/claims/NAME.csv``: claim, article, paper, and each of ours with its condition."""
    path = CLAIMS / f"{name}.csv"
    if not path.is_file():
        raise measured.MeasuredError(f"there is no benchmarks/data/claims/{path.name}")
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    lines = [
        [row["claim"], row["article"] or "–", row["paper"] or "–", "<br>".join(_ours(results, entry) for entry in _entries(row))]
        for row in rows
    ]
    return measured._markdown(["claim", "article", "paper", "here"], [False] * 4, lines)


def _entries(row: dict[str, str]) -> list[tuple[str, str, str, str, dict[str, Any]]]:
    return ast.literal_eval(row["ours"])


def _ours(results: Path, entry: tuple[str, str, str, str, dict[str, Any]]) -> str:
    """One figure with its label: of the one row that fits, or the mean of several, which are seeds."""
    label, name, column, form, where = entry
    if not (results / f"{name}.csv").is_file():
        return f"{label}: {NOT_YET}"
    rows = measured.read(name, results)
    if not any(all(measured._fits(row.get(key), wanted) for key, wanted in where.items()) for row in rows):
        return f"{label}: {NOT_YET}"
    rows = measured.select(rows, [column], where)
    if len(rows) == 1 and "{sd" not in form:
        return f"{label}: {measured.show(rows[0], column, form)}"
    values = [row[column] for row in rows]
    about = {key: cell for key, cell in rows[0].items() if isinstance(cell, int) and len({row[key] for row in rows}) == 1}
    return f"{label}: {_with(measured._mean(values, _kept(form, about)), about)}"


def _kept(form: str, about: dict[str, Any]) -> str:
    """The format with the columns that all rows share doubled, so that a first pass leaves them alone."""
    for key in about:
        form = form.replace(f"{{{key}}}", f"{{{{{key}}}}}")
    return form


def _with(text: str, about: dict[str, Any]) -> str:
    return text.format(**about) if "{" in text else text
