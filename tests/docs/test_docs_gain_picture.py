"""The picture of the gain over training is the committed rows', and shows what the rows say."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs" / "hooks"))
import gain_picture
import measured


def test_the_committed_picture_is_up_to_date(capsys):
    assert gain_picture.main(["--check"]) == 0, "run python docs/hooks/gain_picture.py"


def test_each_curve_is_that_of_its_rows():
    rows = measured.read("stability_curves")
    gain, loss = gain_picture.charts(rows)
    assert ([line.label for line in gain.lines], len(loss.lines)) == (["HC", "mHC", "mHC-lite"], 4)
    drawn = dict(zip(gain.lines[0].curve.x.tolist(), gain.lines[0].curve.y.tolist(), strict=True))
    of_hc = [row for row in rows if (row["variant"], row["condition"]) == ("hc", gain_picture.GAIN)]
    assert drawn == {row["step"]: pytest.approx(row["gain_backward_median"]) for row in of_hc}
    assert gain.log
    assert ET.fromstring(gain_picture.picture.compose([gain, loss])).tag.endswith("svg")


def test_an_old_picture_is_noticed_and_replaced(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gain_picture, "TARGET", tmp_path / "assets" / "gain.svg")
    assert gain_picture.main(["--check"]) == 1
    assert gain_picture.main([]) == 0
    assert gain_picture.main(["--check"]) == 0
