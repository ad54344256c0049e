"""SVG elements as escaped text. No coordinate that is not finite gets through."""

from __future__ import annotations

import math
from collections.abc import Iterable

from markupsafe import Markup, escape


def number(value: float) -> str:
    """A coordinate with at most two decimals; raises ValueError on what is no finite number."""
    if not math.isfinite(value):
        raise ValueError(f"coordinate {value!r} in a drawing")
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def element(tag: str, *children: str | Markup | None, **attributes: object) -> Markup:
    """One element: text is escaped, Markup taken as it is, None left out.

    Attribute names: a trailing underscore is dropped and others become hyphens (``class_``, ``stroke_width``);
    ``viewBox`` and the like pass as they are.
    """
    parts = []
    for name, value in attributes.items():
        if value is None:
            continue
        text = number(value) if isinstance(value, float) else str(value)
        parts.append(f' {name.rstrip("_").replace("_", "-")}="{escape(text)}"')
    head = f"<{tag}{''.join(parts)}"
    inner = "".join(str(escape(child)) for child in children if child is not None)
    return Markup(f"{head}>{inner}</{tag}>" if inner else f"{head}/>")


def group(children: Iterable[Markup], **attributes: object) -> Markup:
    """``<g>`` around elements."""
    return element("g", *children, **attributes)


def path(segments: Iterable[tuple[Iterable[float], Iterable[float]]]) -> str:
    """Path data of broken lines in pixels; a segment of one point becomes a dot (with round caps)."""
    parts = []
    for xs, ys in segments:
        points = [f"{number(x)} {number(y)}" for x, y in zip(xs, ys, strict=True)]
        if points:
            parts.append("M" + "L".join(points) + ("h0" if len(points) == 1 else ""))
    return "".join(parts)
