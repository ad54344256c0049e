"""Slow levels of the network in the report, from the events that the adapter writes."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import numpy as np
import pytest
from runmaker import add_event, make_run, rows

from laneway.report import load_runs, render
from laneway.report.network import HEADINGS, LARGEST, figures, levels, tables
from laneway.rundir import append_row


def slow(path, level: str = "host", seed: int = 0):
    """A run of 60 steps in which a level was degraded from step 20, worse from 30 and well again from 45."""
    run = make_run(path, rows(60, seed))
    schemes = {"from": "host: int8", "to": "host: fp32"}
    link = "host 0 – host 1"
    add_event(run, "network", 20, level=level, link=link, state="degraded", was="up", ratio=3.5, **schemes)
    add_event(run, "network", 30, level=level, link=link, state="degraded", was="degraded", ratio=7.0, **schemes)
    add_event(run, "network", 45, level=level, link=level, state="up", was="degraded", ratio=1.04, **{"from": "x", "to": "x"})
    return run


def test_a_level_is_as_slow_as_its_last_event_says(tmp_path):
    [run] = load_runs([slow(tmp_path / "run").path])
    curve = levels(run)["host"]
    for step, ratio in ((1, 1.0), (19, 1.0), (25, 3.5), (29, 3.5), (31, 7.0), (44, 7.0), (46, 1.0), (60, 1.0)):
        assert np.interp(step, curve.x, curve.y) == ratio
    assert (np.diff(curve.x) >= 0).all()
    [table] = tables([run])
    assert table.headings == HEADINGS
    assert table.rows[0] == ["20", "host", "host 0 – host 1", "up → degraded", "3.50 ×", "host: fp32"]
    assert [row[3] for row in table.rows] == ["up → degraded", "degraded", "degraded → up"]
    assert table.rows[2][5] == "as before: x"


def test_damaged_events_and_a_level_that_does_not_answer(tmp_path):
    run = make_run(tmp_path / "run", [])
    add_event(run, "network", 5, level="<b>rack</b>", state="down", ratio=None)
    append_row(run.events, {"kind": "network", "step": "soon", "level": "host", "state": "down", "ratio": 2.0})
    add_event(run, "network", 7, level="<b>rack</b>", state="down", ratio="NaN")
    [loaded] = load_runs([run.path])
    assert list(levels(loaded)) == ["<b>rack</b>"]
    assert levels(loaded)["<b>rack</b>"].y.max() == LARGEST
    [table] = tables([loaded])
    assert [row[4] for row in table.rows] == ["no answer"] * 2
    assert "<b>rack" not in render([loaded])


@pytest.mark.parametrize("several", [False, True])
def test_the_page_draws_them(tmp_path, several):
    paths = [slow(tmp_path / f"run{index}", ("host", "rack")[index], index).path for index in range(1 + several)]
    runs = load_runs(paths)
    [drawn] = figures(runs)
    assert [key.label for key in drawn.keys] == (["run0: host", "run1: rack"] if several else ["host"])
    root = ET.fromstring(drawn.drawings[0])
    assert len(root.findall(".//{*}path") + root.findall(".//path")) >= 1 + several
    page = render(runs)
    assert "Slow levels of the network" in page
    assert page.count("<h3>Changes of the network") == 1 + several


def test_a_run_without_them_has_no_such_section(tmp_path):
    assert "of the network" not in render(load_runs([make_run(tmp_path / "run", rows(40)).path]))
