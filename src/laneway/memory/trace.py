"""A trace: what one or several training steps did with their memory, entry by entry, without the tensors.

An **entry** is one block of memory that a manager may move (one storage: a saved activation, a parameter, a gradient, the two
AdamW moments of a parameter). An **event** is one entry being produced (allocated, or written again), used or freed, after
``gap`` seconds of pure compute. Events without a gap between them belong to one operation, whose entries must be in fast memory
together; they stay there until the compute of the next gap is done. ``other`` is what the step held besides the entries (bytes
that nothing manages), at its highest since the event before.

An entry that is used before it is produced was there before the trace began (parameters, optimizer state). Step numbers and
entry numbers are indices. Files are gzipped JSON, column by column, the same bytes for the same trace.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from laneway.core import InputError, LanewayError, choice

KINDS = ("activation", "parameter", "gradient", "optimizer", "expert", "kv")
PERSISTENT = frozenset({"parameter", "optimizer", "expert"})
"""Kinds of entries that live on from step to step."""
ACTIONS = ("produce", "use", "free")
FORMAT = 1
TICK = 1e-7
"""Resolution of times in a file, in seconds."""


class Entry(NamedTuple):
    """One block of memory."""

    nbytes: int
    kind: str
    """One of ``KINDS``."""
    module: str = ""
    """Name of the module it belongs to."""
    depth: int | None = None
    """Place of that module in the order of the forward pass."""
    recompute_seconds: float | None = None
    """Compute that makes it again out of ``inputs``; None where that is not possible."""
    inputs: tuple[int, ...] = ()
    """Entries that recomputing reads; they outlive this one's last use."""


class Event(NamedTuple):
    """One access, after ``gap`` seconds of compute."""

    gap: float
    action: str
    """produce | use | free"""
    entry: int
    other: int = 0
    """Bytes that are not managed, at their highest since the event before."""


@dataclass(frozen=True)
class Trace:
    """Events in order, and what they are about.

    Args:
        name: what was recorded.
        entries: the entries by number.
        events: the events in order.
        steps: index of the first event of each training step; the first is 0.

    Raises:
        InputError: a field is out of range, or events contradict each other (a use after the free, an input that is freed or
            written before the last use of what is recomputed from it).
    """

    name: str
    entries: tuple[Entry, ...]
    events: tuple[Event, ...]
    steps: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        _check_shape(self)
        _check_order(self)

    @cached_property
    def given(self) -> frozenset[int]:
        """Entries that were there before the first event."""
        first: dict[int, str] = {}
        for event in self.events:
            first.setdefault(event.entry, event.action)
        return frozenset(entry for entry, action in first.items() if action != "produce")

    @cached_property
    def peak(self) -> int:
        """Most bytes alive at once, with nothing moved away."""
        live = set(self.given)
        level = sum(self.entries[entry].nbytes for entry in live)
        top = level
        for event in self.events:
            if event.action == "produce" and event.entry not in live:
                live.add(event.entry)
                level += self.entries[event.entry].nbytes
            top = max(top, level + event.other)
            if event.action == "free":
                live.remove(event.entry)
                level -= self.entries[event.entry].nbytes
        return top

    def seconds(self, first_step: int = 0) -> float:
        """Pure compute of the steps from ``first_step`` on."""
        start = self.steps[first_step] if first_step < len(self.steps) else len(self.events)
        return math.fsum(event.gap for event in self.events[start:])

    def until(self, step: int) -> Trace:
        """The steps before ``step``, as a trace."""
        return Trace(self.name, self.entries, self.events[: self.steps[step]], self.steps[:step])

    def again(self, step: int) -> Trace:
        """The trace, and its steps from ``step`` on once more, with fresh entries for what is made in them.

        An entry that lives before those steps lives on: it is used where it was freed, and never recomputed.
        """
        start = self.steps[step]
        tail, there = self.events[start:], set(self.given)
        for event in self.events[:start]:
            (there.discard if event.action == "free" else there.add)(event.entry)
        made = dict.fromkeys(event.entry for event in tail if event.entry not in there)
        fresh = {number: len(self.entries) + place for place, number in enumerate(made)}
        entries = [e._replace(recompute_seconds=None, inputs=()) if n in there else e for n, e in enumerate(self.entries)]
        entries += [entries[n]._replace(inputs=tuple(fresh.get(i, i) for i in entries[n].inputs)) for n in fresh]
        once = [e._replace(action="use") if e.action == "free" and e.entry in there else e for e in tail]
        twice = [*once, *(e._replace(entry=fresh.get(e.entry, e.entry)) for e in once)]
        steps = self.steps + tuple(first + len(tail) for first in self.steps[step:])
        return Trace(self.name, tuple(entries), (*self.events[:start], *twice), steps)

    def save(self, path: Path) -> None:
        """Write the file; times are rounded to ``TICK``."""
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(_columns(self), separators=(",", ":"))
        path.write_bytes(gzip.compress(text.encode(), compresslevel=9, mtime=0))

    @classmethod
    def load(cls, path: Path) -> Trace:
        """Read a file that ``save`` wrote.

        Raises:
            LanewayError: there is none, it is no such file, or its content is no valid trace.
        """
        try:
            found = json.loads(gzip.decompress(path.read_bytes()))
            if found["format"] != FORMAT:
                raise LanewayError(f"{path}: a trace of format {found['format']!r}; this version reads {FORMAT}")
            return _from_columns(found)
        except InputError as error:
            raise LanewayError(f"{path}: not a valid trace: {error}") from error
        except OSError as error:
            raise LanewayError(f"{path}: can't be read as a trace ({error.strerror or error})") from error
        except (EOFError, ValueError, KeyError, TypeError, IndexError) as error:
            raise LanewayError(f"{path}: not a trace file ({type(error).__name__}: {error})") from error


def _columns(trace: Trace) -> dict[str, Any]:
    ticks = [None if e.recompute_seconds is None else round(e.recompute_seconds / TICK) for e in trace.entries]
    modules = sorted({e.module for e in trace.entries})
    number = {module: index for index, module in enumerate(modules)}
    return {
        "format": FORMAT,
        "name": trace.name,
        "steps": trace.steps,
        "modules": modules,
        "entries": {
            "nbytes": [e.nbytes for e in trace.entries],
            "kind": [KINDS.index(e.kind) for e in trace.entries],
            "module": [number[e.module] for e in trace.entries],
            "depth": [e.depth for e in trace.entries],
            "recompute": ticks,
            "inputs": [e.inputs for e in trace.entries],
        },
        "events": {
            "gap": [round(e.gap / TICK) for e in trace.events],
            "action": [ACTIONS.index(e.action) for e in trace.events],
            "entry": [e.entry for e in trace.events],
            "other": [e.other for e in trace.events],
        },
    }


def _from_columns(found: dict[str, Any]) -> Trace:
    entries, events, modules = found["entries"], found["events"], found["modules"]
    rows = zip(*(entries[name] for name in ("nbytes", "kind", "module", "depth", "recompute", "inputs")), strict=True)
    return Trace(
        found["name"],
        tuple(
            Entry(nbytes, KINDS[kind], modules[module], depth, None if ticks is None else ticks * TICK, tuple(inputs))
            for nbytes, kind, module, depth, ticks, inputs in rows
        ),
        tuple(
            Event(gap * TICK, ACTIONS[action], entry, other)
            for gap, action, entry, other in zip(*(events[name] for name in ("gap", "action", "entry", "other")), strict=True)
        ),
        tuple(found["steps"]),
    )


def _check_shape(trace: Trace) -> None:
    for index, entry in enumerate(trace.entries):
        field = f"entries[{index}]"
        _whole(f"{field}.nbytes", entry.nbytes, 1)
        choice(f"{field}.kind", entry.kind, KINDS)
        if entry.depth is not None:
            _whole(f"{field}.depth", entry.depth, 0)
        if entry.recompute_seconds is not None:
            _seconds(f"{field}.recompute_seconds", entry.recompute_seconds)
        for other in entry.inputs:
            if other == index or other not in range(len(trace.entries)):
                raise InputError(f"{field}.inputs", list(entry.inputs), "numbers of other entries")
        if entry.inputs and entry.recompute_seconds is None:
            raise InputError(f"{field}.inputs", list(entry.inputs), "none, where recompute_seconds is None")
    for index, event in enumerate(trace.events):
        field = f"events[{index}]"
        _seconds(f"{field}.gap", event.gap)
        choice(f"{field}.action", event.action, ACTIONS)
        _whole(f"{field}.other", event.other, 0)
        if event.entry not in range(len(trace.entries)):
            raise InputError(f"{field}.entry", event.entry, f"a number below {len(trace.entries)}")
    rising = all(a < b for a, b in zip(trace.steps, trace.steps[1:], strict=False))
    if not trace.steps or trace.steps[0] != 0 or not rising or (trace.events and trace.steps[-1] >= len(trace.events)):
        raise InputError("steps", list(trace.steps), "rising indices of events, the first 0")


def _whole(field: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(field, value, f"an integer ≥ {least}")


def _seconds(field: str, value: object) -> None:
    if not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise InputError(field, value, "seconds ≥ 0")


def _check_order(trace: Trace) -> None:
    live, gone = set(trace.given), set[int]()
    written: dict[int, int] = {}
    last = {event.entry: index for index, event in enumerate(trace.events) if event.action == "use"}
    dependants = _dependants(trace.entries)
    for index, event in enumerate(trace.events):
        field, entry = f"events[{index}].action", event.entry
        if event.action != "produce" and entry not in live:
            raise InputError(field, event.action, f"produce first: entry {entry} is not there")
        if event.action == "produce" and entry in gone:
            raise InputError(field, event.action, f"nothing after the free of entry {entry}")
        if event.action == "produce":
            live.add(entry)
            if any(other not in live for other in trace.entries[entry].inputs):
                raise InputError(field, event.action, f"inputs of entry {entry} that are there")
        if event.action != "use":
            for other in dependants.get(entry, ()):
                if other in written and last.get(other, -1) > index:
                    raise InputError(field, event.action, f"entry {entry} unchanged while entry {other} is recomputed from it")
        if event.action == "produce":
            written[entry] = index
        if event.action == "free":
            live.remove(entry)
            gone.add(entry)


def _dependants(entries: Sequence[Entry]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for index, entry in enumerate(entries):
        for other in entry.inputs:
            found.setdefault(other, []).append(index)
    return found
