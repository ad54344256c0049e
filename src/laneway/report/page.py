"""The page: figures and tables put into the template, written at once or not at all."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from laneway import __version__
from laneway.core import InputError, LanewayError
from laneway.report import control, figures, memory_figures, network, palette, plan_figures, schedule, tables
from laneway.report.figures import Figure
from laneway.report.memory_figures import Table
from laneway.report.numbers import moment
from laneway.report.runs import Run, flatten, load_runs
from laneway.rundir import replace_file


@dataclass
class Section:
    """A heading with figures and tables, and lines of text where there is something to say."""

    id: str
    title: str
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    large: bool = False


def write_report(paths: Sequence[str | Path], out: str | Path | None = None) -> tuple[Path, list[Run]]:
    """Draw the runs into one HTML file; returns the file and the runs.

    Args:
        paths: run directories.
        out: the file; default ``report.html`` in the run directory, or in the working directory for several runs.

    Raises:
        InputError: no run, no run directory, the same run twice, or a target that can't be a file.
        LanewayError: a run that can't be read, or a page that can't be written.
    """
    runs = load_runs(paths)
    target = Path(out) if out is not None else (runs[0].path if len(runs) == 1 else Path()) / "report.html"
    if target.is_dir():
        raise InputError("out", str(target), "a file name", "it is a folder")
    if not target.parent.is_dir():
        raise InputError("out", str(target), "a file in an existing folder", f"there is no folder {str(target.parent)!r}")
    page = render(runs).encode("utf-8", errors="replace")
    try:
        replace_file(target, page)
    except OSError as error:
        raise LanewayError(f"{target}: can't write the report ({error.strerror or error})") from error
    return target, runs


def render(runs: list[Run]) -> str:
    """The page as text."""
    script, style = _asset("hover.js"), _asset("style.css") + _palette_css()
    return _template().render(
        runs=runs,
        title=runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared",
        version=__version__,
        script=Markup(script),
        style=Markup(style),
        script_hash=_csp_hash(script),
        style_hash=_csp_hash(style),
        legend=[(tables.printable(run.name), *palette.run_style(i)) for i, run in enumerate(runs)] if len(runs) > 1 else [],
        sections=[section for section in _sections(runs) if section.figures or section.notes or section.tables],
        **_tables(runs),
    )


def _sections(runs: list[Run]) -> list[Section]:
    empty = [f"{run.name} has no metrics rows yet." for run in runs if not run.rows]
    dry = [
        f"{run.name} has no stream figures: a plain residual, or never probed."
        for run in runs
        if run.rows and not run.has_streams
    ]
    unplanned = [f"{run.name}: no plan shown; {tables.printable(run.plan_fault)}." for run in runs if run.plan_fault]
    damaged = [f"{run.name}: no memory shown; {tables.printable(run.memory_fault)}." for run in runs if run.memory_fault]
    return [
        Section("loss", "Loss", list(figures.loss_figures(runs)), empty, large=True),
        Section("optimisation", "Optimisation", list(figures.scalar_figures(runs, figures.OPTIMISATION))),
        Section("speed", "Speed and memory", list(figures.scalar_figures(runs, figures.SPEED))),
        Section("plan", "Plan", list(plan_figures.figures(runs)), unplanned, plan_figures.tables(runs), large=True),
        Section("schedule", "Schedule", list(schedule.figures(runs)), tables=schedule.tables(runs), large=True),
        Section("network", "Network", list(network.figures(runs)), tables=network.tables(runs)),
        Section("memory", "Memory", list(memory_figures.plan_figures(runs)), damaged, memory_figures.tables(runs), large=True),
        Section("memory-passes", "Memory over passes", list(memory_figures.pass_figures(runs))),
        Section("memory-steps", "Memory over steps", list(figures.scalar_figures(runs, figures.MEMORY))),
        Section("streams", "Streams over time", list(figures.scalar_figures(runs, figures.STREAMS)), dry),
        Section("control", "Control of the streams", list(control.figures(runs))),
        Section("depth", "Streams over depth", [*figures.depth_figures(runs), *figures.heat_figures(runs)]),
    ]


def _tables(runs: list[Run]) -> dict[str, Any]:
    differing, equal = tables.config_rows(runs)
    events = [tables.event_rows(run) for run in runs]
    return {
        "finals": tables.final_rows(runs),
        "started": [moment(run.started) for run in runs],
        "differing": differing,
        "equal": equal,
        "events": [row for rows, _ in events for row in rows],
        "events_left_out": sum(left_out for _, left_out in events),
        "samples": [sample for run in runs for sample in tables.samples(run, tables.SAMPLE_LIMIT if len(runs) == 1 else 1)],
        "environments": [(run.name, [(k, tables.printable(v)) for k, v in flatten(run.env)]) for run in runs if run.env],
    }


def _palette_css() -> str:
    """The run colours as CSS variables and classes; dark only on a screen that asks for it, so that prints are light."""
    light = "".join(f"--run{i}:{colour};" for i, colour in enumerate(palette.LIGHT))
    dark = "".join(f"--run{i}:{colour};" for i, colour in enumerate(palette.DARK))
    classes = "".join(f".c{i}{{--c:var(--run{i})}}" for i in range(len(palette.LIGHT)))
    return f":root{{{light}}}@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}{classes}"


def _csp_hash(text: str) -> str:
    """What a content security policy calls an inline block it allows."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@cache
def _asset(name: str) -> str:
    return (resources.files("laneway.report") / "templates" / name).read_text("utf-8")


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_asset("report.html.j2"))
