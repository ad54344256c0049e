"""The report's tables: final figures, configuration, events, samples."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from laneway.report.numbers import MISSING, count, duration, figure, si, size
from laneway.report.runs import Final, Run, flatten
from laneway.rundir import number

# Longer lists are cut in the middle, and the page says so.
EVENT_LIMIT = 200
SAMPLE_LIMIT, TEXT_LIMIT = 3, 4000

FINALS: tuple[tuple[str, str, Callable[[Final], str]], ...] = (
    ("val_loss", "Validation loss", lambda f: _nats(f.val_loss)),
    ("val_bits_per_byte", "Bits per byte", lambda f: figure(f.val_bits_per_byte)),
    ("loss", "Training loss", lambda f: _nats(f.loss)),
    ("steps", "Steps", lambda f: count(f.steps)),
    ("tokens_per_s", "Tokens/s", lambda f: si(f.tokens_per_s)),
    ("seconds", "Duration", lambda f: duration(f.seconds)),
    ("parameters", "Parameters", lambda f: si(f.parameters)),
    ("peak_bytes", "Peak memory", lambda f: size(f.peak_bytes)),
)
LOWEST_IS_BEST = ("val_loss", "val_bits_per_byte")


@dataclass(frozen=True)
class Cell:
    """A table cell."""

    text: str
    best: bool = False


def _nats(value: float) -> str:
    return figure(value) + ("\u202fnats" if math.isfinite(value) else "")


def final_rows(runs: list[Run]) -> list[tuple[str, list[Cell]]]:
    """Label and one cell a run; of several runs the lowest validation loss is marked."""
    rows = []
    for key, label, text in FINALS:
        values = [getattr(run.final, key) for run in runs]
        finite = [value for value in values if math.isfinite(value)]
        best = min(finite) if key in LOWEST_IS_BEST and len(finite) > 1 else math.nan
        rows.append((label, [Cell(text(run.final), value == best) for run, value in zip(runs, values, strict=True)]))
    return rows


def config_rows(runs: list[Run]) -> tuple[list[tuple[str, list[str]]], list[tuple[str, list[str]]]]:
    """Configuration fields that differ between the runs, and those that are equal; a field a run lacks is a dash."""
    flat = [dict(flatten(run.config)) for run in runs]
    names = list(dict.fromkeys(name for fields in flat for name in fields))
    rows = [(name, [fields.get(name, MISSING) for fields in flat]) for name in names]
    return [row for row in rows if len(set(row[1])) > 1], [row for row in rows if len(set(row[1])) == 1]


@dataclass(frozen=True)
class EventRow:
    """One line of the events table."""

    run: str
    step: str
    since: str
    kind: str
    detail: str


def event_rows(run: Run) -> tuple[list[EventRow], int]:
    """The run's events without its samples, and how many were left out in the middle."""
    events = [event for event in run.events if event.get("kind") != "sample"]
    left_out = max(0, len(events) - EVENT_LIMIT)
    if left_out:
        events = events[: EVENT_LIMIT // 2] + events[-(EVENT_LIMIT - EVENT_LIMIT // 2) :]
    return [_event_row(run, event) for event in events], left_out


def _event_row(run: Run, event: dict[str, Any]) -> EventRow:
    since = number(event.get("time")) - run.started
    detail = [f"{name} {_value(value)}" for name, value in event.items() if name not in ("time", "step", "kind", "message")]
    if "message" in event:
        detail.insert(0, printable(str(event["message"])))
    step = event.get("step")
    return EventRow(
        run=run.name,
        step=count(float(step)) if isinstance(step, int | float) else MISSING,
        since=duration(since) if since >= 0 else MISSING,
        kind=printable(str(event.get("kind", MISSING))),
        detail=", ".join(detail)[:1000],
    )


def _value(value: Any) -> str:
    if isinstance(value, float):
        return figure(value)
    return printable(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


@dataclass(frozen=True)
class Sample:
    """Text that a run generated."""

    run: str
    step: str
    prompt: str
    text: str
    cut: bool


def samples(run: Run, limit: int = SAMPLE_LIMIT) -> list[Sample]:
    """The run's last ``limit`` samples, newest first."""
    found = [event for event in run.events if event.get("kind") == "sample"]
    return [_sample(run, event) for event in reversed(found[-limit:])]


def _sample(run: Run, event: dict[str, Any]) -> Sample:
    prompt, text = str(event.get("prompt", "")), str(event.get("text", ""))
    if prompt and text.startswith(prompt):
        text = text[len(prompt) :]
    step = event.get("step")
    return Sample(
        run=run.name,
        step=count(float(step)) if isinstance(step, int | float) else MISSING,
        prompt=printable(prompt[:TEXT_LIMIT]),
        text=printable(text[:TEXT_LIMIT]),
        cut=len(text) > TEXT_LIMIT,
    )


def printable(text: str) -> str:
    """Text that HTML may hold: control characters and lone surrogates become U+FFFD, line ends and tabs stay."""
    return "".join(
        c if c in "\n\t" or not (ord(c) < 32 or 127 <= ord(c) < 160 or 0xD800 <= ord(c) < 0xE000) else "\ufffd" for c in text
    )
