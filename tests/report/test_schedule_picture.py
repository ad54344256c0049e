"""The schedule in the report: stays of tasks, as the events say, each step in one place."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from runmaker import make_run

from laneway.report.page import render
from laneway.report.runs import Run, load_runs
from laneway.report.schedule import Stay, draw, lanes, tables
from laneway.rundir import append_event


def run_of(events: list[dict[str, Any]], last: int = 20) -> Run:
    rows = [{"step": last, "loss": 1.0}]
    return Run(Path("run"), "run", {}, {}, rows, events)


def decided(step: int, reason: str = "better", **places: str) -> dict[str, Any]:
    return {"kind": "schedule", "step": step, "places": places, "reason": reason, "seconds": 0.1}


def test_stays_go_from_one_decision_to_the_next():
    run = run_of([decided(1, "first", a="x", b="p"), decided(5, "trial", a="y", b="p"), decided(6, a="x", b="q")])
    assert lanes(run) == {
        "a": [Stay("x", 1, 5, "first"), Stay("y", 5, 6, "trial"), Stay("x", 6, 21, "better")],
        "b": [Stay("p", 1, 6, "first"), Stay("q", 6, 21, "better")],
    }
    (table,) = tables([run])
    assert table.rows[0] == ["a", "x", "19", "first 1, better 1"]


def test_a_task_that_is_not_due_stays_where_it_ran():
    run = run_of([decided(1, a="x"), decided(3, a="x", save="p"), decided(4, a="y"), decided(6, a="y", save="q")], last=8)
    assert lanes(run)["save"] == [Stay("p", 3, 6, "better"), Stay("q", 6, 9, "better")]


def test_what_a_resume_did_again_counts_once():
    again = [decided(1, a="x"), decided(9, a="y"), {"kind": "resume", "step": 5}, decided(7, a="z")]
    assert lanes(run_of(again)) == {"a": [Stay("x", 1, 7, "better"), Stay("z", 7, 21, "better")]}


def test_no_decisions_no_section():
    assert lanes(run_of([{"kind": "schedule", "step": None}, {"kind": "schedule", "step": 3, "places": 4}])) == {}


PLACES = st.dictionaries(st.sampled_from("abc"), st.sampled_from("xyz<"), min_size=1)


@given(st.lists(st.tuples(st.integers(1, 50), PLACES), min_size=1, max_size=12))
@settings(deadline=None, max_examples=40)
def test_every_step_of_a_task_is_in_one_place(moves):
    run = run_of([decided(step, **places) for step, places in sorted(moves, key=lambda move: move[0])], last=60)
    found = lanes(run)
    for stays in found.values():
        assert [stay.end for stay in stays[:-1]] == [stay.begin for stay in stays[1:]]
        assert stays[-1].end == 61
        assert all(one.place != other.place for one, other in pairwise(stays))
    ET.fromstring(str(draw(found, "s")))


def test_the_page_has_the_section(tmp_path):
    run = make_run(tmp_path / "run")
    append_event(run, "schedule", 1, places={"aggregation": "<flat>"}, changed=["aggregation"], reason="first", seconds=0.1)
    append_event(run, "schedule", 40, places={"aggregation": "levels"}, changed=["aggregation"], reason="better", seconds=0.1)
    page = render(load_runs([run.path]))
    assert 'id="schedule"' in page
    assert "aggregation: &lt;flat&gt;, steps 1 to 39 (first)" in page
    assert "<flat>" not in page
    assert 'id="schedule"' not in render(load_runs([make_run(tmp_path / "other").path]))
