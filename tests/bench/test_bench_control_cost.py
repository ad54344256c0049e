"""The cost of controls: its arithmetic, and a run of seconds."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

import laneway as lw
from laneway.bench import controls
from laneway.bench.control_cost import ControlCostOptions, quick, run, step_ms
from laneway.bench.control_ranks import ControlRanksOptions
from laneway.bench.table import show
from laneway.bench.timer import Samples
from laneway.cli._bench_controls import controls_job


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
    assert (options.dim, options.seconds, options.quick) == (16, 8.0, True)
    report = run(ControlCostOptions(**{**options.__dict__, "seconds": 0.2}))
    rows = report.tables["control_cost"]
    assert [row["variant"] for row in rows] == ["residual", "mhc", "again", *options.controls]
    assert all(row["cpu_ms"] > 0 and row["rounds"] >= 3 and row["tokens"] == 32 for row in rows)
    assert [row["overhead"] is None for row in rows] == [True, True, False, *[False] * len(options.controls)]
    judged = {row["variant"]: row["met"] for row in rows if row["target"] is not None}
    assert judged.keys() == {"curvature", "curvature-res"}
    assert all(judged[row["variant"]] == ("yes" if row["overhead"] <= 0.05 else "no") for row in rows if row["target"])
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


def test_the_verb_makes_a_table_of_all_sizes_and_leaves_the_ranks_out():
    cost = ControlCostOptions(controls=("curvature", "scheduler"), dim=99, sites=2, every=2, sample=14, seconds=0.1)
    report = controls.run(controls.ControlsOptions(cost, ((32, 16), (16, 24)), None))
    assert list(report.tables) == ["control_cost"]
    found = [(row["tokens"], row["dim"], row["variant"]) for row in report.tables["control_cost"]]
    assert found[::5] == [(32, 16, "residual"), (16, 24, "residual")]
    assert list(report.summary) == ["32x16: overhead", "16x24: overhead"]
    show(report, Console(file=(text := io.StringIO())))
    assert "curvature" in text.getvalue()
    small = controls.quick(controls.ControlsOptions())
    assert (small.sizes, small.cost.quick, small.ranks.ranks, small.ranks.quick) == (((512, 128),), True, 2, True)


def test_bad_options_of_the_verb_are_named():
    for options, field in (
        (controls.ControlsOptions(sizes=()), "sizes"),
        (controls.ControlsOptions(sizes=((32, 0),)), "sizes"),
        (controls.ControlsOptions(ControlCostOptions(every=0)), "every"),
        (controls.ControlsOptions(ranks=ControlRanksOptions(ranks=1)), "ranks"),
    ):
        with pytest.raises(lw.InputError, match=f"{field}: got"):
            options.check()
    with pytest.raises(lw.InputError, match="sizes: got '32'"):
        controls_job(sizes=("32",))
    with pytest.raises(lw.InputError, match="settings: got 'purity'"):
        controls_job(settings=("purity",))
