"""Figures of others stand beside ours, and ours come from rows."""

from __future__ import annotations

import csv

import claims
import measured
import pytest


@pytest.fixture
def results(tmp_path):
    rows = [
        {"date": "2026-01-01", "variant": "hc", "seed": seed, "quick": 0, "loss": 2.0 + seed, "share": 0.5, "runs": 20}
        for seed in (0, 1)
    ]
    rows.append({"date": "2026-01-01", "variant": "mhc", "seed": 0, "quick": 0, "loss": 9.0, "share": 0.0, "runs": 20})
    with (tmp_path / "made.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return tmp_path


def ours(results, *entry):
    return claims._ours(results, entry)


def test_one_row_several_and_none(results):
    assert ours(results, "mHC", "made", "share", "{:.0%} of {runs} runs", {"variant": "mhc"}) == "mHC: 0% of 20 runs"
    form = "{:.2f} (sd {sd:.2f}, {count} seeds) of {runs}"
    assert ours(results, "HC", "made", "loss", form, {"variant": "hc"}) == "HC: 2.50 (sd 0.71, 2 seeds) of 20"
    assert ours(results, "HC", "made", "loss", "{}", {"variant": "lite"}) == "HC: not measured yet"
    assert ours(results, "HC", "missing", "loss", "{}", {}) == "HC: not measured yet"


def test_a_column_that_is_not_there_fails(results):
    with pytest.raises(measured.MeasuredError, match="no column"):
        ours(results, "HC", "made", "lose", "{}", {"variant": "hc"})


def test_the_committed_claims_resolve():
    table = claims.claims(measured.RESULTS, "streams")
    assert table.startswith("| claim | article | paper | here |")
    assert table.count("\n") == 8
    with pytest.raises(measured.MeasuredError, match="there is no"):
        claims.claims(measured.RESULTS, "nothing")
