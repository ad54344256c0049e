"""``laneway bench adaptation``: phases as they are defined, and options that are refused."""

from __future__ import annotations

import random

import pytest

from laneway.bench.adaptation import VARIANTS, AdaptationOptions, quick, rows_of
from laneway.core import InputError

PHASES = {"b": "before", "d": "during", "a": "after"}


def course(schemes: str, phases: str) -> dict:
    draw = random.Random()
    rows = [
        {"step": step, "phase": PHASES[phase], "scheme": scheme, "seconds": draw.uniform(1, 2),
         "nbytes": {"rack1.up": draw.randrange(100)}}
        for step, (scheme, phase) in enumerate(zip(schemes, phases, strict=True), 1)
    ]  # fmt: skip
    events = [{"state": "degraded", "link": "rack 1"}, {"state": "up", "link": "L3"}] if "y" in schemes else []
    return {"rows": rows, "events": events, "switches": 2 * ("y" in schemes), "together": True}


def test_phases_of_a_course():
    found = course("xxxxxxyyyyyxxx", "bbbbdddddaaaaa")
    rows = {row["phase"]: row for row in rows_of("rack1", "adapt", found)}
    assert {name: row["steps"] for name, row in rows.items()} == {
        "before": 4, "noticing": 2, "adapted": 3, "recovering": 2, "after": 3
    }  # fmt: skip
    assert rows["noticing"]["communication_s"] == pytest.approx(sum(row["seconds"] for row in found["rows"][4:6]))
    assert rows["adapted"]["uplink_bytes"] == min(row["nbytes"]["rack1.up"] for row in found["rows"][6:9])
    assert rows["before"]["over_before"] == 1.0
    assert rows["after"]["named"] == "rack 1"


def test_without_adaptation_there_is_nothing_to_notice():
    rows = {row["phase"]: row["steps"] for row in rows_of("rack1", "fixed", course("x" * 9, "bbbdddaaa"))}
    assert rows == {"before": 3, "adapted": 3, "after": 3}


def test_options():
    AdaptationOptions().check()
    assert set(quick(AdaptationOptions()).variants) < set(VARIANTS)
    for field, bad in (
        ("link", {"links": ("rack7",)}),
        ("links", {"links": ("rack1.up",)}),
        ("variants", {"variants": ("adpt",)}),
        ("steps", {"steps": (3, 9, 9)}),
        ("slower", {"slower": 1.0}),
        ("jitter", {"jitter": 1.0}),
        ("size_kb", {"size_kb": 0}),
    ):
        with pytest.raises(InputError, match=f"^{field}: "):
            AdaptationOptions(**bad).check()
