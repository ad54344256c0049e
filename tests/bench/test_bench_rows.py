"""Reports as JSON and CSV."""

from __future__ import annotations

import csv
import json

import pytest

from laneway.bench import rows as rows_module
from laneway.bench.rows import Report, append, machine, source_results, versions
from laneway.core import LanewayError


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
    assert not list(tmp_path.glob("**/.*.new"))


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
    with pytest.raises(LanewayError, match="--save DIR"):
        source_results()
