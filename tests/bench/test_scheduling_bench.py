"""``laneway bench scheduling``: rows from steps as they are defined, options that are refused, and one short run in the lab."""

from __future__ import annotations

import random

import pytest

from laneway.bench import netlab
from laneway.bench.scheduling import EXPERIMENTS, SchedulingOptions, quick, rows_of, run
from laneway.bench.scheduling_ranks import EXPERIMENTS as SETTINGS
from laneway.bench.scheduling_ranks import network_of
from laneway.core import InputError


def steps(seed: int) -> list[dict]:
    draw = random.Random(seed)
    return [
        {"step": step, "phase": step // 5, "scheduled": draw.uniform(1, 2), "a": draw.uniform(1, 2), "b": draw.uniform(1, 2),
         "decided": draw.choice("ab")}
        for step in range(20)
    ]  # fmt: skip


def test_rows_are_sums_and_their_ratios():
    found = steps(random.randrange(2**32))
    rows = {row["choice"]: row for row in rows_of("preparing", found)}
    sums = {name: sum(step[name] for step in found) for name in ("scheduled", "a", "b")}
    best = min("ab", key=lambda name: sums[name])
    for name, total in sums.items():
        assert rows[name]["seconds"] == pytest.approx(total)
        assert rows[name]["over_best_fixed"] == pytest.approx(total / sums[best])
        assert rows[name]["over_best_fixed_low"] <= rows[name]["over_best_fixed"] <= rows[name]["over_best_fixed_high"]
        assert rows[name]["best_fixed"] == (name == best)
    by_phase = [[step for step in found if step["phase"] == phase] for phase in range(4)]
    hindsight = sum(min(sum(step[name] for step in part) for name in "ab") for part in by_phase)
    assert rows["hindsight"]["seconds"] == pytest.approx(hindsight)
    decided = [step["decided"] for step in found]
    assert rows["scheduled"]["changes"] == sum(decided[i] != decided[i + 1] for i in range(19))


def test_options():
    assert quick(SchedulingOptions()).phases % 4 == 0
    assert set(SETTINGS) == set(EXPERIMENTS)
    with pytest.raises(InputError, match=r"experiments: got 'reduce'; accepted: one of preparing.*did you mean 'reducing'"):
        SchedulingOptions(("reduce",)).check()
    with pytest.raises(InputError, match="experiments: got ''"):
        SchedulingOptions(()).check()
    with pytest.raises(InputError, match="steps: got 0; accepted: an integer ≥ 1"):
        SchedulingOptions(steps=0).check()


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_choice_is_run_and_one_is_decided(experiment):
    try:
        netlab.available()
    except netlab.Unavailable as error:
        pytest.skip(str(error))
    report = run(SchedulingOptions((experiment,), phases=2, steps=3))
    rows = {row["choice"]: row for row in report.tables["scheduling"]}
    hosts = network_of(SETTINGS[experiment]).world
    fixed = {"flat", "levels"} if experiment == "reducing" else {f"rank {rank}" for rank in range(hosts)}
    assert set(rows) == {*fixed, "scheduled", "hindsight"}
    assert all(row["steps"] == 6 and row["seconds"] > 0 for row in rows.values())
    assert report.as_json()["summary"][experiment]["over_best_fixed"]["value"] > 0
