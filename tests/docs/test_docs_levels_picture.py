"""The picture of the sweep is the committed rows'."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs" / "hooks"))
import levels_picture
import measured


def test_the_committed_picture_is_up_to_date(capsys):
    assert levels_picture.main(["--check"]) == 0, "run python docs/hooks/levels_picture.py"


def test_every_scheme_has_a_curve():
    drawn = levels_picture.charts(measured.read("planner_sweep"))
    assert [len(chart.lines) for chart in drawn] == [5, 5]
    text = levels_picture.picture.compose(drawn)
    assert ET.fromstring(text).tag.endswith("svg")


def test_an_old_picture_is_noticed_and_replaced(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(levels_picture, "TARGET", tmp_path / "assets" / "sweep.svg")
    assert levels_picture.main(["--check"]) == 1
    assert levels_picture.main([]) == 0
    assert levels_picture.main(["--check"]) == 0
