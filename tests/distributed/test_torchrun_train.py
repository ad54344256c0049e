"""`torchrun -m laneway train` as a user types it: errors and signals; its output and resuming are in test_parallel_curves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch import TRAIN, torchrun

from laneway.checkpoint import CheckpointStore
from laneway.rundir import RunDirectory
from laneway.train.config import TrainConfig
from laneway.train.settings import to_toml

pytestmark = pytest.mark.distributed


@pytest.fixture
def here(small: TrainConfig, tmp_path: Path) -> Path:
    """A folder with the configuration in it, where commands run."""
    (tmp_path / "c.toml").write_text(to_toml(small))
    return tmp_path


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
