"""The cost of controls over ranks: rows from given times, and two real ranks whose collectives are counted."""

from __future__ import annotations

import pytest

from laneway.bench.control_ranks import CYCLE, SETTINGS, ControlRanksOptions, rows_of, run
from laneway.core import InputError


def test_extra_is_the_paired_difference_over_whole_cycles():
    off = [10.0] * CYCLE + [20.0] * CYCLE + [40.0] * CYCLE
    more = [v * 1.5 if i % 6 == 0 else v for i, v in enumerate(off)]
    found = {
        "off": {"ms": off, "cpu_ms": more, "collectives": [2.0], "shared_bytes": [8]},
        "purify": {"ms": more, "cpu_ms": more, "collectives": [2.0, 4.0], "shared_bytes": [24]},
    }
    plain, purify = rows_of(ControlRanksOptions(), found)
    assert (plain["extra"], plain["step_ms"], plain["target"], plain["met"]) == (0, 20, None, None)
    assert purify["extra"] == pytest.approx(0.5 / 6)
    assert purify["extra_cpu"] == purify["extra_cpu_q3"] == 0
    assert (purify["collectives"], purify["shared_bytes"], purify["met"]) == (3, 24, "no")
    assert list(plain) == list(purify)


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_under_all_settings():
    report = run(ControlRanksOptions(ranks=2, dim=8, layers=2, batch=1, context=8, cycles=1, timeout_s=300))
    rows = {row["setting"]: row for row in report.tables["control_ranks"]}
    assert rows.keys() == SETTINGS.keys()
    assert all(row["step_ms"] > 0 for row in rows.values())
    assert {row["collectives"] for row in rows.values()} == {rows["off"]["collectives"]}  # whole gradients: none of their own
    assert rows["off"]["extra"] == rows["off"]["extra_cpu"] == 0
    shared = {name: row["shared_bytes"] for name, row in rows.items()}
    assert (
        shared["off"]
        == shared["again"]
        == shared["guard"]
        == shared["purify"]
        < shared["curvature"]
        < shared["scheduler"]
        < shared["all"]
    )


@pytest.mark.parametrize(
    "wrong", [{"ranks": 1}, {"settings": ("purity",)}, {"parallel": "none"}, {"cycles": 0}], ids=lambda wrong: next(iter(wrong))
)
def test_bad_options_are_named(wrong):
    with pytest.raises(InputError, match=next(iter(wrong))):
        run(ControlRanksOptions(**wrong))
