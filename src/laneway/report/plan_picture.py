"""A plan as a picture: levels from the outermost to the devices, the groups on each, the axes that cross it, bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from laneway.report import palette
from laneway.report.numbers import duration, si
from laneway.report.plan import AXES, LevelRow, PlanView
from laneway.report.svg import element, group
from laneway.report.tables import printable

BOXES = 16
ROW, LEFT, MIDDLE, WIDTH, TOP = 66, 190, 400, 860, 10
BOX_HEIGHT, CHIP = 16, 74
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#1a2027}.soft{fill:#56616d}.box{fill:none;stroke:#a9b1ba}.bar{fill:#0067a8}"
    ".chip{opacity:.16}.rule{stroke:#dde1e6}" + "".join(f".c{i}{{fill:{colour}}}" for i, colour in enumerate(palette.LIGHT))
)


def plan_picture(data: Mapping[str, Any]) -> str:
    """A plan as a stand-alone SVG file."""
    drawing = draw(PlanView.of(data), "plan", Markup(f"<style>{STYLE}</style>"))
    return str(drawing).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)


def draw(plan: PlanView, identifier: str, style: Markup | None = None) -> Markup:
    """The picture as an ``<svg>``: one row a level, the outermost on top, the parts of the step below."""
    rows = [_row(level, TOP + at * ROW, plan) for at, level in enumerate(plan.levels)]
    foot = TOP + len(rows) * ROW + 8
    return element(
        "svg",
        element("title", printable(plan.title), id=f"{identifier}-t"),
        element("desc", described(plan), id=f"{identifier}-d"),
        style,
        *rows,
        _step(plan, foot),
        class_="plan",
        viewBox=f"0 0 {WIDTH} {foot + 52}",
        role="img",
        aria_labelledby=f"{identifier}-t {identifier}-d",
    )


def described(plan: PlanView) -> str:
    """The picture in words."""
    parts = []
    for level in plan.levels:
        crossing = ", ".join(f"{axis.name} of {axis.size}" for axis in level.axes) or "no axis"
        parts.append(f"{level.name}: {_groups(level)} of {level.members}; crossed by {crossing}; {_sent(level)}.")
    return " ".join(parts)


def _bytes(value: float, per: str = "") -> str:
    """A count of bytes with a decimal prefix, as networks have them."""
    text = si(value)
    return f"{text}B{per}" if not text[-1].isdigit() else f"{text}\u202fB{per}"


def _sent(level: LevelRow) -> str:
    return f"{_bytes(level.nbytes)} sent a device and step"


def _groups(level: LevelRow) -> str:
    return f"{level.groups} group{'s' if level.groups > 1 else ''}"


def _row(level: LevelRow, top: float, plan: PlanView) -> Markup:
    most = max((each.nbytes for each in plan.levels), default=0.0)
    speed = f"{printable(level.network)}, {_bytes(level.bandwidth, '/s')} a device"
    groups = f"{_groups(level)} of {level.members}"
    parts = [
        element("line", class_="rule", x1=0.0, x2=float(WIDTH), y1=top + ROW - 6, y2=top + ROW - 6),
        element("text", f"{printable(level.name)}: {groups}", x=8.0, y=top + 18),
        element("text", speed, class_="soft", x=8.0, y=top + 36),
        *_boxes(level, top + 6),
        *_chips(level, top + 32),
    ]
    wide = (WIDTH - LEFT - MIDDLE - 40) * (level.nbytes / most if most > 0 else 0.0)
    left = float(LEFT + MIDDLE + 20)
    parts.append(element("rect", class_="bar", x=left, y=top + 6, width=max(wide, 1.0), height=float(BOX_HEIGHT)))
    parts.append(element("text", _sent(level), class_="soft", x=left, y=top + 42))
    return group(parts)


def _boxes(level: LevelRow, top: float) -> list[Markup]:
    """One box a group, up to a number; each cut into its members while they can be told apart."""
    shown = min(level.groups, BOXES)
    wide = (MIDDLE - 20) / shown
    drawn = []
    for at in range(shown):
        left, inner = LEFT + at * wide, wide - 4
        drawn.append(element("rect", class_="box", x=left, y=top, width=inner, height=float(BOX_HEIGHT), rx="2"))
        if inner / level.members >= 3:
            cuts = [left + inner * part / level.members for part in range(1, level.members)]
            drawn += [element("line", class_="box", x1=x, x2=x, y1=top, y2=top + BOX_HEIGHT) for x in cuts]
    if level.groups > shown:
        drawn.append(element("text", "…", class_="soft", x=float(LEFT + MIDDLE - 18), y=top + 12))
    return drawn


def _chips(level: LevelRow, top: float) -> list[Markup]:
    """The axes whose groups have members on both sides of this level's links."""
    drawn = []
    for at, axis in enumerate(level.axes):
        left, colour = float(LEFT + at * (CHIP + 6)), AXES.index(axis.name)
        label = f"{axis.name.replace('dp_replicate', 'replicate').replace('dp_shard', 'shard')} {axis.size}"
        drawn.append(element("rect", class_=f"chip c{colour}", x=left, y=top, width=float(CHIP), height=17.0, rx="8"))
        drawn.append(element("text", label, x=left + CHIP / 2, y=top + 13, text_anchor="middle"))
    if not level.axes:
        drawn.append(element("text", "nothing crosses it", class_="soft", x=float(LEFT), y=top + 13))
    return drawn


def _step(plan: PlanView, top: float) -> Markup:
    """The parts of a step, as long as they take."""
    spent = {name: seconds for name, seconds in plan.breakdown.items() if seconds > 0}
    total, left, parts = math.fsum(spent.values()), 8.0, []
    for at, (name, seconds) in enumerate(spent.items()):
        wide = (WIDTH - 16) * seconds / total
        tip = element("title", f"{name}: {duration(seconds)}")
        parts.append(
            element("rect", tip, class_=f"c{at % len(palette.LIGHT)}", x=left, y=top, width=wide, height=14.0, opacity="0.6")
        )
        if wide > 9 * len(name):
            parts.append(element("text", name, x=left + 4, y=top + 30))
        left += wide
    parts.append(element("text", f"one step: {duration(total)}", class_="soft", x=8.0, y=top + 46))
    return group(parts)
