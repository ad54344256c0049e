"""The only way a measured figure gets into the documentation: a directive that names a row of a committed CSV file.

    {{ figure("layer", "speedup", "{:.1f} ×", variant="ours", dtype="bf16") }}    one value of the one row that fits
    {{ table("layer", ["variant", ("wall_ms", "median, ms", "{:.1f}")], dtype="bf16") }}    all rows that fit
    {{ table("layer") }}    the same with every column but those that ``source`` tells
    {{ means("quality", "variant", [("val_loss", "loss", "{:.3f} ± {sd:.3f}")]) }}    a row a variant, over its rows
    {{ source("layer") }}    file, date, versions and machine of the newest rows
    {{ when("layer") }} … {{ otherwise() }} … {{ end() }}    the first part once the file exists, until then the second
    {{ rules("run") }}, {{ rules("machine") }}    what `laneway doctor` looks for, from its own source
    {{ claims("streams") }}    figures of others, from benchmarks/data/claims, beside our rows
    {{ settings("memory") }}    the fields of a part of the configuration, their variables, defaults and meanings, from its source

The first argument names a file in benchmarks/results. Conditions compare with a cell; a list means any of its values, and
None an empty cell. A format sees the value as {} and every other cell of the row by its column's name (in ``means``: sd, min,
max and count); bytes are shown as {:.1MiB}. Where a file holds
several dates, the newest rows that fit count. No row, or for ``figure`` more than one: MeasuredError, and the build fails.
In code, directives are left alone.
"""

from __future__ import annotations

import ast
import csv
import inspect
import re
import statistics
import string
import textwrap
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
# Code first, so that a directive in code is taken for code.
_PARTS = re.compile(
    r"(?P<code>^(?P<fence>```+|~~~+).*?^(?P=fence)[ \t]*$|`[^`\n]+`)|\{\{(?P<call>.*?)\}\}", re.DOTALL | re.MULTILINE
)

# Columns that say where and when a row was measured.
PROVENANCE = ("date", "laneway", "torch", "cpu", "cores", "device")

# Columns that say what a row is about. A run's rows, which have none of them, belong together.
CONDITION = (
    "model",
    "tokens",
    "dim",
    "streams",
    "dtype",
    "threads",
    "allocator",
    "compared",
    "layers",
    "context",
    "batch_size",
    "steps",
    "lr",
    "quick",
)

Cell = str | int | float | None
Row = dict[str, Cell]


class MeasuredError(Exception):
    """A directive that can't be resolved: where, which, and why."""


def render(text: str, where: str, results: Path = RESULTS) -> str:
    """``text`` with every directive replaced.

    Args:
        text: Markdown.
        where: what the text is called in error messages.
        results: folder of the CSV files.

    Raises:
        MeasuredError: a directive is malformed, or no row fits it.
    """
    out: list[str] = []
    branch: list[bool] = []  # of the open ``when``: whether what follows is shown
    end = 0
    for match in _PARTS.finditer(text):
        showing = all(branch)
        if showing:
            out.append(text[end : match.start()])
        end = match.end()
        if match["code"] is not None:
            out += [match["code"]] if showing else []
            continue
        try:
            name, given, named = _parse(match["call"])
            if name in ("when", "otherwise", "end"):
                _switch(branch, name, given, results)
            elif showing:
                out.append(_DIRECTIVES[name](results, *given, **named))
        except (MeasuredError, TypeError, ValueError, KeyError, IndexError) as error:
            raise MeasuredError(f"{where}: {{{{{match['call']}}}}}: {error}") from error
    if branch:
        raise MeasuredError(f"{where}: a when() without its end()")
    return "".join([*out, text[end:]])


def _parse(call: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Name and literal arguments of a directive; nothing is evaluated."""
    try:
        node = ast.parse(call.strip(), mode="eval").body
    except SyntaxError as error:
        raise MeasuredError(f"not a directive ({error.msg})") from error
    known = [*_DIRECTIVES, "when", "otherwise", "end"]
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in known):
        raise MeasuredError(f"accepted: a call of {', '.join(known)}")
    named = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords if keyword.arg}
    return node.func.id, [ast.literal_eval(item) for item in node.args], named


def _switch(branch: list[bool], name: str, given: list[Any], results: Path) -> None:
    if name == "when":
        if branch:
            raise MeasuredError("a when() inside another one")
        branch.append(all(_path(results, item).is_file() for item in given))
    elif not branch:
        raise MeasuredError(f"{name}() without a when()")
    elif name == "otherwise":
        branch[0] = not branch[0]
    else:
        branch.pop()


def _path(results: Path, name: str) -> Path:
    return results / f"{name}.csv"


def read(name: str, results: Path = RESULTS) -> list[Row]:
    """All rows of ``benchmarks/results/NAME.csv``; numbers as numbers, empty cells as None."""
    path = _path(results, name)
    if not path.is_file():
        raise MeasuredError(f"there is no benchmarks/results/{path.name}")
    with path.open(encoding="utf-8", newline="") as file:
        return [{key: _cell(value) for key, value in row.items()} for row in csv.DictReader(file)]


def _cell(text: str | None) -> Cell:
    if text is None or text == "":
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def select(rows: list[Row], columns: list[str], where: dict[str, Any]) -> list[Row]:
    """The newest rows of each condition that fit ``where``; raises MeasuredError where a column or every row is missing."""
    known = list(rows[0]) if rows else []
    for column in [*columns, *where]:
        if column not in known:
            raise MeasuredError(f"no column {column!r}; there are {', '.join(map(str, known))}")
    fit = [row for row in rows if all(_fits(row[key], wanted) for key, wanted in where.items())]
    if not fit:
        raise MeasuredError("no row fits")
    newest: dict[tuple[Cell, ...], str] = {}
    for row in fit:
        newest[_condition(row)] = max(newest.get(_condition(row), ""), str(row.get("date")))
    return [row for row in fit if str(row.get("date")) == newest[_condition(row)]]


def _condition(row: Row) -> tuple[Cell, ...]:
    """What was measured, as against what came out: rows that agree in it replace each other by date."""
    return tuple(row.get(column) for column in CONDITION)


def _fits(value: Cell, wanted: Any) -> bool:
    return value in wanted if isinstance(wanted, list) else value == wanted


class _Formatter(string.Formatter):
    """Format specifications as usual, and ``.1MiB`` for bytes."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec.endswith("MiB"):
            return f"{format(value / 2**20, format_spec.removesuffix('MiB') + 'f')} MiB"
        return format(value, format_spec)


_FORMATTER = _Formatter()


def show(row: Row, column: str, form: str) -> str:
    """One cell as text; an empty one is a dash."""
    value = row[column]
    return "–" if value is None else _FORMATTER.format(form, value, **{str(key): cell for key, cell in row.items()})


def figure(results: Path, name: str, column: str, form: str = "{}", **where: Any) -> str:
    """One value of the one row that fits."""
    rows = select(read(name, results), [column], where)
    if len(rows) != 1:
        raise MeasuredError(f"{len(rows)} rows fit; name more conditions")
    if rows[0][column] is None:
        raise MeasuredError(f"the row has no {column}")
    return show(rows[0], column, form)


def table(results: Path, name: str, columns: list[Any] | None = None, **where: Any) -> str:
    """A Markdown table of the rows that fit. A column is a name, (name, heading) or (name, heading, format)."""
    full = _full(columns or [])
    rows = select(read(name, results), [column for column, _, _ in full], where)
    full = full or [(column, column, _plain_form(rows, column)) for column in rows[0] if column not in PROVENANCE]
    numeric = [all(not isinstance(row[column], str) for row in rows) for column, _, _ in full]
    return _markdown([heading for _, heading, _ in full], numeric, [[show(row, *column[::2]) for column in full] for row in rows])


def means(results: Path, name: str, by: str, columns: list[Any], **where: Any) -> str:
    """A Markdown table with a row for each value of the column ``by``: means over its rows (over seeds, say)."""
    full = _full(columns)
    rows = select(read(name, results), [by, *(column for column, _, _ in full)], where)
    lines = []
    for value in dict.fromkeys(row[by] for row in rows):
        group = [row for row in rows if row[by] == value]
        lines.append([str(value), *(_mean([row[column] for row in group], form) for column, _, form in full)])
    return _markdown([by, *(heading for _, heading, _ in full)], [False] + [True] * len(full), lines)


def _mean(cells: list[Cell], form: str) -> str:
    if not all(isinstance(cell, int | float) for cell in cells):
        raise MeasuredError("a cell without a number")
    values = [float(cell) for cell in cells if cell is not None]
    sd = statistics.stdev(values) if len(values) > 1 else float("nan")
    about = {"sd": sd, "min": min(values), "max": max(values), "count": len(values)}
    return _FORMATTER.format(form, statistics.fmean(values), **about)


def _full(columns: list[Any]) -> list[tuple[str, str, str]]:
    return [(item, item, "{}") if isinstance(item, str) else (*item, "{}")[:3] for item in columns]


def _markdown(headings: list[str], right: list[bool], lines: list[list[str]]) -> str:
    lines = [headings, ["---:" if flag else "---" for flag in right], *lines]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def _plain_form(rows: list[Row], column: str) -> str:
    """Four digits for a column that holds fractions."""
    return "{:.4g}" if any(isinstance(row[column], float) for row in rows) else "{}"


def source(results: Path, name: str, **where: Any) -> str:
    """Where the newest rows of a file come from: the file and every column that says something about the machine."""
    rows = select(read(name, results), [], where)
    told = []
    for column in PROVENANCE:
        values = sorted({str(row[column]) for row in rows if row.get(column) is not None})
        if values:
            told.append(f"{column} {', '.join(values)}")
    return f"benchmarks/results/{name}.csv" + (f": {'; '.join(told)}" if told else "")


def rules(_results: Path, kind: str) -> str:
    """A table of doctor's rules over a ``run`` (with what it looks at, and its knobs) or the ``machine``: name, limit, reason."""
    from laneway.doctor import advice
    from laneway.doctor import rules as run_rules

    kinds = {"run": run_rules.RULES, "machine": advice.MACHINE_RULES}
    if kind not in kinds:
        raise MeasuredError(f"accepted: {', '.join(kinds)}")
    if kind == "machine":
        lines = [[f"`{rule.name}`", _escaped(rule.threshold)] for rule in advice.MACHINE_RULES]
        return _markdown(["rule", "fires at"], [False] * 2, lines)
    lines = []
    for rule in run_rules.RULES:
        knobs = ", ".join(f"`{name}`" for name in rule.knobs)
        lines.append([f"`{rule.name}`", rule.looks_at, _escaped(rule.threshold), knobs])
    return _markdown(["rule", "looks at", "fires at", "knobs"], [False] * 4, lines)


def settings(_results: Path, part: str) -> str:
    """A table of the fields of ``[memory]``: name, variable of the environment, default, and the text beside it in the source."""
    from laneway.memory import config

    if part != "memory":
        raise MeasuredError("accepted: memory")
    lines = []
    for name, text in _field_texts(config.MemoryConfig).items():
        default = getattr(config.MemoryConfig, name)
        lines.append([f"`{name}`", f"`{config.VARIABLES[name]}`", "empty" if default == "" else f"`{default}`", text])
    return _markdown(["field", "variable", "default", "meaning"], [False] * 4, lines)


def claims(results: Path, name: str) -> str:
    """A table of what others state (benchmarks/data/claims/NAME.csv) beside our rows."""
    from claims import claims as made  # it reads rows through this module

    return made(results, name)


def _field_texts(kind: type) -> dict[str, str]:
    """The text under each field of a dataclass."""
    (body,) = (node.body for node in ast.parse(textwrap.dedent(inspect.getsource(kind))).body if isinstance(node, ast.ClassDef))
    return {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }  # fmt: skip


def _escaped(text: str) -> str:
    return text.replace("H_", "H\\_")


_DIRECTIVES: dict[str, Callable[..., str]] = {
    "figure": figure,
    "table": table,
    "means": means,
    "source": source,
    "rules": rules,
    "settings": settings,
    "claims": claims,
}
