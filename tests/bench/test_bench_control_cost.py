"""The cost of controls: its arithmetic, and a run of seconds."""

from __future__ import annotations

import pytest

import laneway as lw
from laneway.bench.control_cost import ControlCostOptions, quick, run, step_ms
from laneway.bench.timer import Samples


def test_a_measuring_step_is_spread_over_its_interval():
    samples = {
        "curvature": Samples([9, 9], [0.1, 0.2]),
        "curvature watching": Samples([9, 9], [0.3, 0.2]),
        "mhc": Samples([9], [0.1]),
    }
    assert step_ms("curvature", 4, samples) == pytest.approx([150, 200])
    assert step_ms("mhc", 4, samples) == pytest.approx([100])


def test_every_variant_has_a_row():
    options = quick(ControlCostOptions(dim=16, sites=2, tokens=32, every=3, sample=14, seconds=1.0))
    assert (options.dim, options.seconds, options.quick) == (16, 10.0, True)
    report = run(ControlCostOptions(**{**options.__dict__, "seconds": 0.2}))
    rows = report.tables["control_cost"]
    assert [row["variant"] for row in rows] == ["residual", "mhc", *options.controls]
    assert all(row["cpu_ms"] > 0 and row["rounds"] >= 3 and row["tokens"] == 32 for row in rows)
    assert [row["overhead"] is None for row in rows] == [True, True, False, False, False]
    assert all(row["overhead_q1"] <= row["overhead"] <= row["overhead_q3"] for row in rows[2:])
    assert set(report.summary["overhead"]) == set(options.controls)


def test_bad_options_are_named():
    for options, field in (
        (ControlCostOptions(controls=("curvatur",)), "controls"),
        (ControlCostOptions(every=0), "every"),
        (ControlCostOptions(streams=1), "streams"),
        (ControlCostOptions(seconds=0), "seconds"),
        (ControlCostOptions(threads=-1), "threads"),
    ):
        with pytest.raises(lw.InputError, match=f"{field}: got"):
            options.check()
    with pytest.raises(lw.InputError, match="sample: got 5"):
        run(ControlCostOptions(dim=16, sites=1, tokens=16, sample=5, seconds=0.1))
