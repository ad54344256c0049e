"""The run directory's files: what is written is read, what a kill left is dropped, what is broken is said."""

from __future__ import annotations

import json
import os
import stat
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laneway.core import InputError, LanewayError
from laneway.rundir import RunDirectory, append_event, append_row, read_rows, replace_file

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


def test_a_file_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "x.toml"
    replace_file(path, b"one, and longer than what follows")
    replace_file(path, b"two")
    assert path.read_bytes() == b"two"
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_renamed_is_on_the_disk(tmp_path, monkeypatch):
    log, fsync, replace = [], os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (log.append("fsync"), fsync(handle)))
    monkeypatch.setattr(Path, "replace", lambda path, target: (log.append("rename"), replace(path, target))[1])
    replace_file(tmp_path / "x", b"new")
    assert log == ["fsync", "rename"]


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_a_replaced_file_has_the_permissions_of_a_new_one(tmp_path, mask):
    path = tmp_path / "x"
    path.write_bytes(b"old")
    path.chmod(0o600)
    before = os.umask(mask)
    try:
        replace_file(path, b"new")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_replacement_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, failure):
    path = tmp_path / "x"
    path.write_bytes(b"old")

    def fail(handle):
        raise failure

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(type(failure)):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_rename_that_fails_leaves_nothing(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "inside").touch()
    with pytest.raises(OSError, match="directory"):
        replace_file(tmp_path / "x", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_writers_at_once_do_not_mix(tmp_path):
    path = tmp_path / "x"
    contents = [bytes([65 + i]) * 50_000 for i in range(8)]
    threads = [threading.Thread(target=replace_file, args=(path, data)) for data in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_bytes() in contents
    assert list(tmp_path.iterdir()) == [path]
