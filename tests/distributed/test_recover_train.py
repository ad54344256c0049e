"""`laneway train --failure-timeout …`: a lost rank ends the run with one line; started again, it loses nothing."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from laneway.checkpoint import load_export
from laneway.rundir import RunDirectory
from laneway.train.config import TrainConfig
from laneway.train.settings import to_toml

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(520)]

LOST = re.compile(r"laneway train: lost rank (\d) of 2 on host \S+ \(process \d+\): .*; noticed by rank \d")


def restarted(small: TrainConfig, folder: Path, *cases: str) -> dict[str, Any]:
    config = dataclasses.replace(small, steps=16, probe_every=0, validate_every=8, failure_timeout=8.0)
    (folder / "c.toml").write_text(to_toml(config))
    command = [sys.executable, str(Path(__file__).with_name("restarts.py")), "c.toml", *cases]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def check(folder: Path, starts: list[dict[str, Any]], name: str, undisturbed: str, lost: int, code: int = -9) -> None:
    """Two starts; one line and exit code 1 from the rank that was left; and the curve and weights of the undisturbed run."""
    assert [start["codes"] for start in starts] == [[code, 1] if lost == 0 else [1, code], [0, 0]], starts
    told = LOST.findall("\n".join(starts[0]["said"]))
    assert told == [str(lost)], starts[0]["said"]
    assert "Traceback" not in starts[0]["said"][1 - lost]
    run, plain = RunDirectory(folder / name), RunDirectory(folder / undisturbed)
    events = [(event["kind"], event["step"]) for event in run.read_events() if event["kind"] in ("start", "resume", "lost")]
    assert [kind for kind, _ in events] == ["start", "lost", "resume"]
    assert events[2][1] == 10
    for key in ("loss", "grad_norm", "val_loss"):
        assert [row.get(key) for row in run.read_metrics()] == [row.get(key) for row in plain.read_metrics()]
    assert len(run.read_metrics()) == 16
    expected, _ = load_export(plain.path / "export")
    found, _ = load_export(run.path / "export")
    assert all(found[key].equal(tensor) for key, tensor in expected.items())


@pytest.mark.slow
def test_a_killed_rank_costs_no_bit(small, tmp_path):
    found = restarted(small, tmp_path, "undisturbed", "killed")
    assert [start["codes"] for start in found["undisturbed"]] == [[0, 0]]
    check(tmp_path, found["killed"], "killed", "undisturbed", lost=1)


@pytest.mark.slow
def test_the_first_rank_a_frozen_one_and_sharded_ones(small, tmp_path):
    cases = ("undisturbed", "killed_first", "frozen", "sharded_undisturbed", "sharded_killed")
    found = restarted(small, tmp_path, *cases)
    check(tmp_path, found["killed_first"], "killed_first", "undisturbed", lost=0)
    check(tmp_path, found["frozen"], "frozen", "undisturbed", lost=1)
    check(tmp_path, found["sharded_killed"], "sharded_killed", "sharded_undisturbed", lost=0)
