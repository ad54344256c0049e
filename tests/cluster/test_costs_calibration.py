"""Calibration files: what is read, and what is refused."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from laneway.cluster.costs import SOURCES, Calibration
from laneway.core import InputError


def test_every_default_has_a_source() -> None:
    assert set(SOURCES) == {field.name for field in fields(Calibration)}
    assert all(len(source) > 20 for source in SOURCES.values())


def test_toml_and_json(tmp_path: Path) -> None:
    (tmp_path / "probe.toml").write_text("matmul_fraction = 0.7\nflash_attention = false\n", "utf-8")
    (tmp_path / "probe.json").write_text(json.dumps({"network_efficiency": 0.8}), "utf-8")
    assert Calibration.load(tmp_path / "probe.toml") == Calibration(matmul_fraction=0.7, flash_attention=False)
    assert Calibration.load(tmp_path / "probe.json") == Calibration(network_efficiency=0.8)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("matmul_fractoin = 0.7", "did you mean 'matmul_fraction'"),
        ("matmul_fraction = 0.0", "above 0 to 1"),
        ("matmul_fraction = 1.5", "above 0 to 1"),
        ("matmul_fraction = '0.7'", "a number"),
        ("overlap_fraction = -0.1", "from 0 to 1"),
        ("kernel_s = nan", "a number from 0"),
        ("dispatch_s = inf", "a number from 0"),
        ("flash_attention = 1", "true or false"),
        ("matmul_fraction = ", "a TOML or JSON file"),
    ],
)
def test_refused(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "probe.toml"
    path.write_text(text, "utf-8")
    with pytest.raises(InputError, match=told):
        Calibration.load(path)


def test_missing_file_and_other_shapes(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="can't be read"):
        Calibration.load(tmp_path / "none.toml")
    (tmp_path / "list.json").write_text("[1]", "utf-8")
    with pytest.raises(InputError, match="names of constants"):
        Calibration.load(tmp_path / "list.json")
