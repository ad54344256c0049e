"""The study of dropping runs on processes, counts its bytes, and pairs its losses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from laneway.bench.dropping import BASELINE, DroppingOptions, quick, run
from laneway.core import InputError


@pytest.mark.distributed
@pytest.mark.slow
def test_rows_of_a_short_study():
    options = replace(quick(DroppingOptions()), steps=3, members=2, batch_size=4, dim=32, context=32, layers=1)
    report = run(options)
    rows, counted = report.tables["dropping"], {row["scheme"]: row for row in report.tables["dropping_bytes"]}
    assert [row["variant"] for row in rows] == list(options.variants)
    dense, bf16 = rows[0], rows[1]
    assert dense["variant"] == BASELINE
    assert dense["sent_bytes"] == dense["dense_bytes"]
    assert dense["val_loss_over_dense"] == 0
    assert bf16["val_loss"] - dense["val_loss"] == bf16["val_loss_over_dense"] != 0
    assert bf16["saved_share"] > 0.7
    assert counted["-40% bf16"]["saved_over_zero3"] > 0.7
    assert counted["-40% fp32"]["saved_over_zero3"] > 0.4
    assert counted["dense bf16"]["saved_over_zero3"] == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize(("change", "field"), [({"variants": ("dense",)}, "variants"), ({"members": 1}, "members")])
def test_bad_options_are_refused(change, field):
    with pytest.raises(InputError) as error:
        run(replace(DroppingOptions(), **change))
    assert error.value.field == field
