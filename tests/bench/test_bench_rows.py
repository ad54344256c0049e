"""Reports as JSON and CSV."""

from __future__ import annotations

import csv
import errno
import json
import math
import os

import pytest

from laneway.bench import rows as rows_module
from laneway.bench.rows import Report, append, machine, results_folder, source_results, versions
from laneway.core import InputError, LanewayError


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_rows_are_stamped_and_appended(tmp_path):
    path = tmp_path / "new" / "x.csv"
    append(path, [{"variant": "a", "wall_ms": 1.23456789, "peak": None}])
    append(path, [{"variant": "b", "wall_ms": 2e-9, "peak": 7}])
    found = read(path)
    assert [row["variant"] for row in found] == ["a", "b"]
    assert found[0]["wall_ms"] == "1.23457"
    assert (found[0]["peak"], found[1]["peak"]) == ("", "7")
    assert all(row["date"] and row["torch"] and row["cpu"] for row in found)
    assert [item.name for item in path.parent.iterdir()] == ["x.csv"]


def test_other_columns_are_refused_and_the_file_stays(tmp_path):
    path = tmp_path / "x.csv"
    append(path, [{"variant": "a", "wall_ms": 1.0}])
    before = path.read_bytes()
    with pytest.raises(LanewayError, match="wall_s"):
        append(path, [{"variant": "a", "wall_s": 1.0}])
    with pytest.raises(LanewayError, match="different columns"):
        append(path, [{"variant": "a", "wall_ms": 1.0}, {"variant": "a"}])
    assert path.read_bytes() == before


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(LanewayError, match="can't be written"):
        append(tmp_path / "file" / "x.csv", [{"a": 1}])


def test_json_has_the_documented_keys():
    report = Report("layer", {"layer": [{"a": 1}], "layer_agreement": [{"b": 2}]}, {"s": {"value": 1.0, "low": 0.5, "high": 2.0}})
    found = json.loads(json.dumps(report.as_json()))
    assert list(found)[:5] == ["bench", "machine", "versions", "rows", "summary"]
    assert found["rows"] == [{"a": 1}, {"b": 2}]
    assert found["machine"]["cores"] >= 1
    assert found["versions"]["torch"] == versions()["torch"]
    assert machine()["cpu"]


def test_every_table_has_its_file(tmp_path):
    report = Report("layer", {"layer": [{"a": 1}], "layer_agreement": [{"b": 2}], "none": []}, {})
    assert sorted(path.name for path in report.save(tmp_path)) == ["layer.csv", "layer_agreement.csv"]


def test_outside_a_checkout_a_folder_must_be_named(monkeypatch, tmp_path):
    assert source_results().name == "results"
    monkeypatch.setattr(rows_module, "__file__", str(tmp_path / "a" / "b" / "c" / "rows.py"))
    with pytest.raises(InputError, match="--save DIR"):
        source_results()


def test_a_folder_to_save_in_is_looked_at_first(tmp_path):
    assert results_folder("") == source_results()
    assert results_folder(str(tmp_path / "new" / "one")).is_dir()
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError) as caught:
        results_folder(str(tmp_path / "file" / "below"))
    assert caught.value.field == "save"


def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "x.csv"
    append(path, [{"a": 1}])
    before = path.read_bytes()

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(rows_module.os, "fsync", full)
    with pytest.raises(LanewayError, match="No space left"):
        append(path, [{"a": 2}])
    assert path.read_bytes() == before
    assert [item.name for item in tmp_path.iterdir()] == ["x.csv"]


def test_a_diverged_run_is_null_in_json_and_empty_in_csv(tmp_path):
    diverged = [{"val_loss": math.nan, "variant": "hc"}]
    report = Report(
        "quality", {"quality": diverged}, {"hc": {"val_loss": {"value": None, "low": None, "high": None, "sd": math.inf}}}
    )
    found = json.loads(json.dumps(report.as_json(), allow_nan=False))
    assert found["rows"][0]["val_loss"] is None
    assert found["summary"]["hc"]["val_loss"]["sd"] is None
    assert read(append(tmp_path / "x.csv", diverged))[0]["val_loss"] == ""
