"""What doctor says of a run before its findings: where it stands, who wrote it, its ranks, what controlled it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from laneway import __version__
from laneway.doctor.facts import RunFacts
from laneway.rundir import column, number

ENDS = ("finish", "stop", "signal", "lost")
BEGINS = ("start", "resume")


def run_lines(path: Path, facts: RunFacts, now: float | None = None) -> list[tuple[str, str]]:
    """Label and text of everything that is known about a run. ``now``: seconds since the epoch, by default the clock's."""
    lines = [("run", str(path)), ("rows", f"{len(facts.rows)}, up to step {facts.last_step:.0f}")]
    lines.append(("state", _state(path, facts, time.time() if now is None else now)))
    if facts.others:
        lines.append(("ranks", f"{1 + len(facts.others)}; the curves are rank 0's, memory is looked at on all"))
    written = facts.env.get("laneway")
    if written not in (None, __version__):
        lines.append(("version", f"written by laneway {written}, read by {__version__}: rules pass over what is not there"))
    control = _control(facts)
    return [*lines, ("controls", control)] if control else lines


def _state(path: Path, facts: RunFacts, now: float) -> str:
    last = next((event for event in reversed(facts.events) if event.get("kind") in ENDS + BEGINS), {})
    step = f"{number(last.get('step')):.0f}"
    match last.get("kind"):
        case "finish":
            return f"finished at step {step}"
        case "stop":
            reason = _line(last.get("reason"))
            return reason if reason.startswith("stopped at") else f"stopped after step {step}: {reason}"
        case "lost":
            return f"ranks {last.get('ranks')} were lost after step {step}: {_line(last.get('reason'))}"
        case "signal":
            return f"stopped by {last.get('signal')} after step {step}; go on: laneway train --resume --out {path}"
    times = [*column(facts.rows, "time")[1], *(number(event.get("time")) for event in facts.events)]
    newest = max((seen for seen in times if seen == seen), default=None)
    if newest is None:
        return "no end is written: still starting, or killed"
    return f"no end is written: still running, or killed; last heard of {_ago(now - newest)} ago"


def _line(text: Any) -> str:
    return " ".join(str(text).split())[:200]


def _ago(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _control(facts: RunFacts) -> str:
    """What the controls of streams and gradients did; empty where none was on."""
    told = []
    strength, curvature = facts.series("lambda").finite(), [row for row in facts.rows if "curvature" in row]
    if len(strength):
        told.append(f"curvature constraint: λ {strength.values[-1]:.3g} at the end")
    elif curvature:
        told.append("curvature measured")
    if facts.setting("control.scheduler") is True:
        told.append("scheduler on")
    purified = facts.series("purified_paths").finite()
    if len(purified):
        paths = {str(event.get("path")) for event in facts.events if event.get("kind") == "purify"}
        steps = int((purified.values > 0).sum())
        told.append(f"gradients of {len(paths)} paths corrected, in {steps} of {len(purified)} rows")
    return "; ".join(told)
