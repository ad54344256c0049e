"""Colours: eight for runs that stay apart for colour-blind readers, and a ramp for heat maps.

The run colours follow Okabe and Ito's set (jfly.uni-koeln.de/color), darkened for light paper and lightened for dark so
that each has a contrast of at least 3:1 with its background. Every run also has its own dash pattern.
"""

from __future__ import annotations

import math

LIGHT = ("#0067a8", "#c9520a", "#00795c", "#a3407f", "#9a6a00", "#2f8fce", "#5c5c5c", "#7b4fc9")
DARK = ("#5ab4f0", "#ff8f57", "#2fc79b", "#e58fc6", "#e3b23c", "#9bd2ff", "#b5bcc4", "#b79bff")
# Stroke patterns in pixels; five against eight colours, so that forty runs differ in at least one of both.
DASHES = ("none", "7 3", "2 3", "9 3 2 3", "12 4")
RAMP_LEVELS = 48


def run_style(index: int) -> tuple[int, str]:
    """Colour number and dash pattern of the index-th run."""
    return index % len(LIGHT), DASHES[index % len(DASHES)]


def ramp(share: float) -> str:
    """Heat-map colour for 0 … 1: lightness rises evenly from deep blue over teal to pale yellow, so grey print works too."""
    share = min(max(share, 0.0), 1.0)
    lightness = 0.28 + 0.66 * share
    hue = math.radians(285 - 180 * share)
    chroma = 0.115 + 0.03 * math.sin(math.pi * share)
    while True:
        channels = _oklch_to_linear(lightness, chroma, hue)
        if all(-1e-4 <= c <= 1.0001 for c in channels):
            return "#" + "".join(f"{_gamma(c):02x}" for c in channels)
        chroma *= 0.93


def _oklch_to_linear(lightness: float, chroma: float, hue: float) -> tuple[float, float, float]:
    """Oklab (Ottosson 2020) in polar form to linear sRGB."""
    a, b = chroma * math.cos(hue), chroma * math.sin(hue)
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    return (
        4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
    )


def _gamma(linear: float) -> int:
    """Linear light to an sRGB byte."""
    linear = min(max(linear, 0.0), 1.0)
    return round(255 * (12.92 * linear if linear <= 0.0031308 else 1.055 * linear ** (1 / 2.4) - 0.055))


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two ``#rrggbb`` colours after WCAG 2."""
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
