"""A link gets slow in the middle of a run on a network in a lab: who notices, what is done, and that it is taken back once."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from pathlib import Path

import pytest
from netlab import Lab, assert_bytes
from netlab_adapts import trains

from laneway.bench.adaptation_ranks import Course, rank_main, scheme_of
from laneway.bench.netlab import Network
from laneway.cluster.probe.ladder import link_load
from laneway.rundir import RunDirectory
from laneway.train.config import TrainConfig
from laneway.train.reduction_config import ReductionConfig
from laneway.train.settings import to_toml

NETWORK = Network.grid(2, 2, 2)
CALM = {"degraded": 3.0, "restored": 2.0, "severe": 6.0}
"""On a machine that others use too, little but the link must look slow."""


def _runs(rows) -> list[tuple[str, int]]:
    """Schemes with the step from which on each was used."""
    return [(rows[0]["scheme"], 1)] + [(b["scheme"], b["step"]) for a, b in pairwise(rows) if a["scheme"] != b["scheme"]]


@pytest.mark.parametrize(
    ("link", "mbit", "named"),
    [("rack1", 20.0, "rack of ranks 4-7"), pytest.param("r0h1", 60.0, "host of ranks 2-3", marks=pytest.mark.slow)],
)
def test_a_slow_link_is_answered_at_one_step_and_taken_back_once(lab: Lab, link, mbit, named):
    course = Course(link=link, mbit=mbit, after=60, drop=link == "rack1")
    found = lab.run(rank_main, NETWORK, {"course": vars(course), "rules": CALM}, timeout=80)
    base = str(scheme_of(course, 3))
    ways = [_runs(each["rows"]) for each in found]
    assert all(way == ways[0] for way in ways)
    assert [each["events"] for each in found] == [found[0]["events"]] * 8
    events = found[0]["events"]
    told = str(events) + str([(row["step"], row["scheme"], round(row["seconds"], 3)) for row in found[0]["rows"]])
    assert any(named in event["link"] for event in events), told
    schemes = ways[0]
    assert schemes[0] == (base, 1)
    assert schemes[-1][0] == base, told
    changed, back = schemes[1][1], schemes[-1][1]
    assert course.before < changed <= course.before + 6, told
    assert back > course.before + course.during
    rows = found[0]["rows"]
    good = [_least(rows, base, "before"), _least(rows, base, "after")]
    for counted in good:
        assert_bytes(counted, link_load(scheme_of(course, 3), (2, 2, 2), 2) * course.nbytes)
    assert _least(rows, schemes[1][0], "during") <= (0.2 if course.drop else 0.56) * course.nbytes


def _least(rows, scheme: str, phase: str) -> int:
    """Bytes of a step on the uplink; the probe's own are in some steps."""
    return min(row["nbytes"]["rack0.up"] for row in rows if (row["scheme"], row["phase"]) == (scheme, phase))


def test_a_link_that_jitters_changes_nothing(lab: Lab):
    course = Course(before=25, during=0, after=0, jitter=0.2)
    found = lab.run(rank_main, NETWORK, {"course": vars(course), "rules": CALM}, timeout=60)
    assert [event for event in found[0]["events"] if event["level"] == "L3"] == []
    assert len({str([row["scheme"] for row in each["rows"]]) for each in found}) == 1
    paths = found[0]["paths"]
    assert all(each["paths"] == paths for each in found)
    assert {path["level"] for path in paths} == {0, 1, 2}
    outer = [rate for path in paths if path["level"] == 2 for rate in path["rates"]]
    assert all(0 < rate < 2 * 150e6 / 8 + 64e3 / 0.004 for rate in outer)


@pytest.mark.slow
def test_a_run_writes_down_what_was_slow_and_what_it_did(lab: Lab, small: TrainConfig, tmp_path: Path):
    """A training run under DDP; on a loaded machine other levels may look slow, too."""
    reduction = ReductionConfig(over="levels", topology="1xCPU_2nodes_2racks", chunk_bytes=1 << 16, adapt=True)
    model = dataclasses.replace(small.model, dim=64)
    config = dataclasses.replace(small, model=model, steps=40, parallel="ddp", reduction=reduction)
    (tmp_path / "config.toml").write_text(to_toml(config))
    network = Network.grid(2, 2, 1, rack_mbit=100.0)
    given = {"folder": str(tmp_path), "steps": (16, 28), "mbit": 8.0}
    lab.run(trains, network, given, timeout=100, preload=["torch._dynamo"])
    run = RunDirectory(tmp_path / "run")
    events = [event for event in run.read_events() if event["kind"] == "network"]
    told = str(events) + str([(row["step"], row["loss"]) for row in run.read_metrics()])
    assert events, told
    first = next((event for event in events if event["level"] == "L3"), events[0])
    assert first["level"] == "L3", told
    assert (first["was"], first["state"]) == ("up", "degraded")
    assert 16 <= first["step"] <= 22, told
    assert any("rack of" in event["link"] for event in events), told
    assert first["from"] != first["to"]
    assert any("network_slow" in row for row in run.read_metrics())
