"""`torchrun -m laneway train` as a user types it: output, exact resume, other numbers of ranks, errors, signals."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from launch import torchrun

from laneway.checkpoint import CheckpointStore
from laneway.rundir import RunDirectory
from laneway.train.config import TrainConfig
from laneway.train.loop import train
from laneway.train.settings import to_toml

pytestmark = pytest.mark.distributed

TRAIN = ("-m", "laneway", "train", "--config", "c.toml")


@pytest.fixture
def here(small: TrainConfig, tmp_path: Path) -> Path:
    """A folder with the configuration in it, where commands run."""
    (tmp_path / "c.toml").write_text(to_toml(small))
    return tmp_path


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in RunDirectory(folder).read_metrics() if "loss" in row]


def cut_to(run: Path, step: int) -> None:
    """What the run directory looked like right after the checkpoint of ``step``, had the processes been killed then."""
    store = CheckpointStore(RunDirectory(run))
    for later in [found for found in store.steps() if found > step]:
        for path in sorted(store.folder(later).rglob("*"), reverse=True):
            path.unlink()
        store.folder(later).rmdir()
    assert store.latest_step() == step


def test_two_ranks_print_one_json_object_and_resume_exactly(here, small):
    done = torchrun(2, *TRAIN, "--out", "run", "--json", cwd=here)
    result: dict[str, Any] = json.loads(done.stdout)
    assert result["run"] == "run"
    assert result["steps"] == small.steps
    assert done.stderr.count("step 10/10") == 1  # the other rank keeps silent
    first = losses(here / "run")
    cut_to(here / "run", 5)
    again = torchrun(2, *TRAIN, "--out", "run", "--json", "--resume", cwd=here)
    assert json.loads(again.stdout)["val_loss"] == result["val_loss"]
    assert losses(here / "run") == first
    assert ("resume", 5) in [(event["kind"], event["step"]) for event in RunDirectory(here / "run").read_events()]


def test_one_rank_goes_on_where_two_sharded_ones_stopped(here, small):
    train(small, out=here / "one", console=None)
    torchrun(2, *TRAIN, "--out", "run", "--parallel", "fsdp", cwd=here)
    cut_to(here / "run", 5)
    alone = dataclasses.replace(small, parallel="none")
    result = train(alone, out=here / "run", resume=True, console=None)
    assert losses(here / "run") == pytest.approx(losses(here / "one"), rel=2e-5)
    assert result.steps == 10


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--batch-size", "3"], "batch_size: got 3; accepted: a multiple of the 2 ranks"),
        pytest.param(["--parallel", "none"], "parallel: got 'none'; accepted: auto, ddp or fsdp", marks=pytest.mark.slow),
        pytest.param(["--model.vocab-size", "99"], "model.vocab_size: got 99", marks=pytest.mark.slow),
    ],
)
def test_bad_input_is_one_line_and_ends_all_ranks(here, flags, message):
    done = torchrun(2, *TRAIN, "--out", "run", *flags, cwd=here, check=False)
    assert done.returncode != 0
    assert done.stderr.count(message) == 1
    assert "exitcode  : 2" in done.stderr
    assert "Traceback" not in done.stderr.split("torch/distributed/")[0]
    assert not (here / "run").exists()


def test_sigterm_to_torchrun_saves_on_all_ranks(here):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *TRAIN]
    command += ["--out", "run", "--steps", "100000", "--validate-every", "0", "--checkpoint-every", "0", "--probe-every", "0"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (here / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=here, env=env, stdout=log, stderr=log)
    metrics, deadline = RunDirectory(here / "run").metrics(1), time.monotonic() + 120
    while not (metrics.is_file() and metrics.stat().st_size > 2000):
        assert time.monotonic() < deadline, (here / "log").read_text()
        assert process.poll() is None, (here / "log").read_text()
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=60)
    events = RunDirectory(here / "run").read_events()
    assert [event["kind"] for event in events] == ["start", "checkpoint", "signal"]
    assert events[-1]["signal"] == "SIGTERM"
    assert CheckpointStore(RunDirectory(here / "run")).latest_step() == events[-1]["step"]
