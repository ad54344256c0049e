"""Draws docs/assets/tiny-run.svg from benchmarks/results/tiny_run.csv: python docs/hooks/picture.py [--check]

Two charts by laneway.report's own drawing code: bits per byte, and the composite gain of the streams. The colours follow the
reader's light or dark setting; the ground is opaque, so that the picture is readable on a page that doesn't.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from markupsafe import Markup

from laneway.report.chart import Chart, Line, draw
from laneway.report.palette import DARK, LIGHT
from laneway.report.series import Curve
from laneway.report.svg import element, group

sys.path.insert(0, str(Path(__file__).parent))
import measured

NAME = "tiny_run"
TARGET = measured.ROOT / "docs" / "assets" / "tiny-run.svg"
WIDTH, HEIGHT, HEAD, GAP = 420, 250, 46, 24  # pixels: one chart, the room for its title and legend, between charts
GROUND = {"paper": ("#ffffff", "#161b21"), "ink": ("#1a2027", "#e7ebef"), "soft": ("#56616d", "#9da8b4")}
GROUND |= {"grid": ("#e9ecef", "#262d35"), "axis": ("#a9b1ba", "#5b6672")}
RULES = """
text{font:12px system-ui,"Segoe UI",Roboto,Helvetica,Arial,sans-serif;fill:var(--soft)}
.title{font-size:14px;font-weight:600;fill:var(--ink)}
line.grid{stroke:var(--grid)}line.axis{stroke:var(--axis)}
.reference{stroke:var(--axis);stroke-dasharray:1 3;stroke-linecap:round}
.curve{fill:none;stroke:var(--c);stroke-width:1.8;stroke-linejoin:round}.curve.faint{stroke-width:1;opacity:.3}
.curve.points{stroke-width:1.1;opacity:.75}.dots circle{fill:var(--c);stroke:var(--paper)}.key{stroke:var(--c);stroke-width:2.5}
"""


def curve(rows: list[measured.Row], column: str) -> Curve:
    """A column over steps; rows without it are left out."""
    found = [(row["step"], row[column]) for row in measured.select(rows, [column], {}) if row[column] is not None]
    if not found:
        raise measured.MeasuredError(f"column {column!r} is empty")
    return Curve(*np.array(found, dtype=float).T)


def charts(rows: list[measured.Row]) -> list[Chart]:
    """What is drawn."""
    raw, validation = curve(rows, "bits_per_byte"), curve(rows, "val_bits_per_byte")
    loss = [
        Line(raw, "each step", 0, kind="faint"),
        Line(raw.smooth(), "training", 0),
        Line(validation, "validation", 1, kind="points"),
    ]
    ends = {"low": 1.0, "least_span": 0.1, "reference": 1.0}
    gains = [Line(curve(rows, f"gain_{way}"), way, index) for index, way in enumerate(("forward", "backward"))]
    return [Chart("Bits per byte", "", loss, log=True), Chart("Composite gain of the streams", "", gains, **ends)]


def picture(rows: list[measured.Row]) -> str:
    """The SVG file's text."""
    return compose(charts(rows))


def compose(drawn: list[Chart]) -> str:
    """Charts side by side with their titles and legends, as an SVG file's text."""
    total = len(drawn) * WIDTH + (len(drawn) - 1) * GAP
    parts = [element("style", Markup(_style())), element("rect", width="100%", height="100%", fill="var(--paper)")]
    for index, chart in enumerate(drawn):
        x = index * (WIDTH + GAP)
        inner = draw(chart, f"chart{index}", WIDTH, HEIGHT)
        placed = Markup(str(inner).replace("<svg ", f'<svg x="{x}" y="{HEAD}" width="{WIDTH}" height="{HEIGHT}" ', 1))
        parts += [element("text", chart.title, class_="title", x=x + 12.0, y=20.0), _legend(chart, x + 12.0), placed]
    size = {"width": total, "height": HEAD + HEIGHT, "viewBox": f"0 0 {total} {HEAD + HEIGHT}"}
    return str(element("svg", *parts, xmlns="http://www.w3.org/2000/svg", role="img", **size)) + "\n"


def _legend(chart: Chart, x: float) -> Markup:
    parts = []
    for line in chart.lines:
        parts.append(
            element(
                "line",
                class_=f"key c{line.colour}",
                x1=x,
                x2=x + 18,
                y1=34.0,
                y2=34.0,
                opacity=0.3 if line.kind == "faint" else None,
            )
        )
        parts.append(element("text", line.label, x=x + 24, y=38.0))
        x += 24 + 7.0 * len(line.label) + 18
    return group(parts)


def _style() -> str:
    """Colours for both settings, then what they are used for."""
    blocks = []
    for shade, palette in enumerate((LIGHT, DARK)):
        names = {name: colours[shade] for name, colours in GROUND.items()} | {
            f"run{i}": colour for i, colour in enumerate(palette)
        }
        blocks.append(":root{" + ";".join(f"--{name}:{colour}" for name, colour in names.items()) + "}")
    classes = "".join(f".c{i}{{--c:var(--run{i})}}" for i in range(len(LIGHT)))
    return f"{blocks[0]}@media (prefers-color-scheme:dark){{{blocks[1]}}}{classes}{RULES}".replace("\n", "")


def publish(name: str, target: Path, draw: Callable[[list[measured.Row]], str], check: bool) -> int:
    """Draw the rows of a table into ``target``, or check that it is as drawn; prints one line, returns the exit code."""
    if not (measured.RESULTS / f"{name}.csv").is_file():
        print(f"no benchmarks/results/{name}.csv yet: nothing drawn")
        return 0
    new = draw(measured.read(name))
    if target.is_file() and target.read_text("utf-8") == new:
        print(f"{target.name} is up to date")
        return 0
    if check:
        print(f"{target.name} is not up to date: run `make figures`", file=sys.stderr)
        return 1
    target.parent.mkdir(exist_ok=True)
    target.write_text(new, "utf-8")
    print(f"wrote {target.name}")
    return 0


def main(args: list[str]) -> int:
    """Write or check."""
    return publish(NAME, TARGET, picture, "--check" in args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
