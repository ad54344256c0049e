"""A run → CSV → README's picture."""

from __future__ import annotations

import csv
import io
import json
from xml.etree import ElementTree

import export_run
import measured
import picture
import pytest

from laneway.report.palette import DARK, LIGHT, contrast
from laneway.rundir import RunDirectory, append_event, append_row


def make_run(path, finished=True, steps=60):
    path.mkdir()
    run = RunDirectory(path)
    run.config.write_text("steps = 60\n[model]\nresidual = 'mhc'\nstreams = 4\n", "utf-8")
    run.env.write_text(
        json.dumps(
            {"laneway": "0.1.0", "torch": "2.13.0", "cpu": "Some CPU", "cores": 4, "threads": 2, "device": {"type": "cpu"}}
        ),
        "utf-8",
    )
    append_event(run, "start", 0, parameters=1000)
    for step in range(1, steps + 1):
        row = {
            "step": step,
            "time": 1.7e9 + step,
            "loss": 5.0 / step**0.3,
            "bits_per_byte": 7.123456789 / step**0.3,
            "tokens_per_s": 900.0,
        }
        if step % 10 == 0:
            row |= {"gain_forward": 1 + step / 1000, "gain_backward": 1.0, "site_gain_forward": [1.0, 1.1]}
            row |= {"val_loss": 4.0 / step**0.3, "val_bits_per_byte": 6.0 / step**0.3}
        append_row(run.metrics(), row)
    if finished:
        append_event(run, "finish", steps, val_loss=1.5, val_bits_per_byte=2.16, seconds=61.5)
    return path


@pytest.fixture
def results(tmp_path):
    folder = tmp_path / "results"
    folder.mkdir()
    assert export_run.main([str(make_run(tmp_path / "run")), "--results", str(folder)]) == 0
    return folder


def test_curves_hold_every_scalar_of_every_row(results):
    rows = list(csv.DictReader(io.StringIO((results / "tiny_run.csv").read_text("utf-8"))))
    assert len(rows) == 60
    assert list(rows[0]) == [
        "step", "loss", "bits_per_byte", "val_loss", "val_bits_per_byte", "gain_backward", "gain_forward", "tokens_per_s",
    ]  # fmt: skip
    assert rows[0]["bits_per_byte"] == "7.12346"
    assert rows[0]["gain_forward"] == ""
    assert rows[9]["gain_forward"] == "1.01"


def test_summary_is_one_row_with_machine_and_finals(results):
    (row,) = measured.read("tiny_run_summary", results)
    assert (row["cpu"], row["cores"], row["threads"], row["device"], row["laneway"]) == ("Some CPU", 4, 2, "cpu", "0.1.0")
    assert (row["residual"], row["streams"], row["steps"], row["parameters"]) == ("mhc", 4, 60, 1000)
    assert row["val_bits_per_byte"] == 2.16
    assert row["seconds"] == 61.5
    assert row["largest_gain_forward"] == 1.06
    assert str(row["date"]).count("-") == 2
    assert not list(results.glob("*.part"))


def test_what_is_no_finished_run_is_refused(tmp_path, capsys):
    assert export_run.main([str(tmp_path / "nothing"), "--results", str(tmp_path)]) == 2
    assert "there is no such folder" in capsys.readouterr().err
    assert export_run.main([str(make_run(tmp_path / "run", finished=False)), "--results", str(tmp_path)]) == 2
    assert "not finished" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.csv"))


def test_readmes_block_is_filled_from_the_export(results):
    import readme

    text = readme.updated("<!-- figures --><!-- end of figures -->", readme.TEMPLATE.read_text("utf-8"), results)
    assert "2.160 bits per byte" in text
    assert "Some CPU" in text
    assert "docs/assets/tiny-run.svg" in text


def test_the_picture_is_drawn_by_the_report(results):
    text = picture.picture(measured.read("tiny_run", results))
    tree = ElementTree.fromstring(text)
    space = {"s": "http://www.w3.org/2000/svg"}
    plots = tree.findall("s:svg", space)
    assert [plot.find("s:title", space).text for plot in plots] == ["Bits per byte", "Composite gain of the streams"]
    curves = tree.findall(".//s:path[@data-label]", space)
    assert [c.get("data-label") for c in curves] == ["each step", "training", "validation", "forward", "backward"]
    assert all(c.get("d").startswith("M") for c in curves)
    identifiers = [node.get("id") for node in tree.iter() if node.get("id")]
    assert len(identifiers) == len(set(identifiers))
    assert "http" not in text.replace("http://www.w3.org/2000/svg", ""), "nothing is loaded from elsewhere"


def test_the_picture_is_readable_on_light_and_dark():
    for shade, palette in enumerate((LIGHT, DARK)):
        paper = picture.GROUND["paper"][shade]
        assert contrast(picture.GROUND["soft"][shade], paper) > 4.5
        assert contrast(picture.GROUND["ink"][shade], paper) > 7
        assert all(contrast(colour, paper) > 3 for colour in palette[:2])


def test_a_column_that_is_missing_or_empty_is_said(results):
    rows = measured.read("tiny_run", results)
    with pytest.raises(measured.MeasuredError, match="no column 'gain_forward'"):
        picture.picture([{k: v for k, v in row.items() if k != "gain_forward"} for row in rows])
    with pytest.raises(measured.MeasuredError, match="'gain_forward' is empty"):
        picture.picture([row | {"gain_forward": None} for row in rows])


def test_the_committed_picture_is_up_to_date(capsys):
    assert picture.main(["--check"]) == 0, "run `make figures`"


def test_check_notices_an_old_picture(results, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(measured, "RESULTS", results)
    monkeypatch.setattr(picture.measured.read, "__defaults__", (results,))
    monkeypatch.setattr(picture, "TARGET", tmp_path / "assets" / "tiny-run.svg")
    assert picture.main(["--check"]) == 1
    assert picture.main([]) == 0
    assert picture.main(["--check"]) == 0
    assert ElementTree.parse(tmp_path / "assets" / "tiny-run.svg").getroot().tag.endswith("svg")
