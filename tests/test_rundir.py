"""The run directory's files: what is written is read, what a kill left is dropped, what is broken is said."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laneway.core import InputError, LanewayError
from laneway.rundir import RunDirectory, append_event, append_row, read_rows

ROW = st.dictionaries(
    st.text(max_size=5), st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(), max_size=5
)


@given(st.lists(ROW, max_size=8), st.integers(0, 200))
def test_a_torn_tail_is_dropped_and_writing_goes_on(tmp_path_factory, rows, cut):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    for row in rows:
        append_row(path, row)
    assert list(read_rows(path)) == rows
    if not path.exists():
        return
    whole = path.read_bytes()
    path.write_bytes(whole[: max(0, len(whole) - cut)])
    kept = list(read_rows(path))
    assert kept == rows[: len(kept)]
    append_row(path, {"after": 1})
    again = list(read_rows(path))
    assert again[-1] == {"after": 1}
    assert again[:-1] == rows[: len(again) - 1]


def test_a_long_torn_tail(tmp_path):
    path = tmp_path / "rows.jsonl"
    append_row(path, {"a": 1})
    with path.open("ab") as file:
        file.write(b'{"b": "' + b"x" * 20_000)
    append_row(path, {"c": 3})
    assert list(read_rows(path)) == [{"a": 1}, {"c": 3}]


def test_a_broken_row_in_the_middle_is_an_error_with_its_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n{"b": \n{"c": 3}\n')
    with pytest.raises(LanewayError, match="line 2"):
        list(read_rows(path))


def test_a_missing_file_has_no_rows(tmp_path):
    assert list(read_rows(tmp_path / "none.jsonl")) == []


def test_the_later_row_of_a_step_counts(tmp_path):
    run = RunDirectory(tmp_path)
    for step, loss in ((1, 5.0), (2, 4.0), (2, 4.5), (3, 4.0)):
        append_row(run.metrics(), {"step": step, "time": 0.0, "loss": loss})
    assert [(row["step"], row["loss"]) for row in run.read_metrics()] == [(1, 5.0), (2, 4.5), (3, 4.0)]


def test_events_carry_time_step_and_kind(tmp_path):
    run = RunDirectory(tmp_path)
    append_event(run, "checkpoint", 7, path="x")
    (event,) = run.read_events()
    assert (event["kind"], event["step"], event["path"]) == ("checkpoint", 7, "x")
    assert event["time"] > 1e9


def test_opening_what_is_no_run_says_so(tmp_path):
    with pytest.raises(InputError, match="no such folder"):
        RunDirectory.open(tmp_path / "missing")
    with pytest.raises(InputError, match="no config"):
        RunDirectory.open(tmp_path)
    (tmp_path / "config.toml").write_text("steps = 3\n")
    assert RunDirectory.open(tmp_path).read_config() == {"steps": 3}
    assert RunDirectory.open(tmp_path).read_env() == {}
    (tmp_path / "env.json").write_text(json.dumps({"torch": "2"}))
    assert RunDirectory.open(tmp_path).read_env() == {"torch": "2"}
