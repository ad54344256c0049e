"""Going on is exact: twenty steps are ten, a new start and ten more, bit for bit; and no other run is mistaken for this one."""

from __future__ import annotations

import dataclasses
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from laneway.checkpoint import load_export
from laneway.core import InputError, LanewayError
from laneway.rundir import RunDirectory
from laneway.train.config import TrainConfig
from laneway.train.loop import train
from laneway.train.settings import to_toml


class CrashError(Exception):
    """Ends a run from inside, as a crash would."""


class Dice:
    """An extension with state that also draws from every generator, so that a wrong one would show; may crash."""

    def __init__(self, crash_at: int | None = None) -> None:
        self.crash_at, self.sum = crash_at, 0.0
        self.draws: list[float] = []

    def on_step_begin(self, step: int) -> None:
        self.draws.append(random.random() + float(np.random.rand()) + float(torch.rand(())))
        self.sum += self.draws[-1]

    def on_backward_end(self, step: int) -> None:
        if step == self.crash_at:
            raise CrashError

    def on_step_end(self, step: int, metrics: dict[str, Any]) -> None:
        metrics["sum"] = self.sum

    def state_dict(self) -> dict[str, Any]:
        return {"sum": self.sum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sum = state["sum"]


def go(config: TrainConfig, out: Path, **options: Any) -> None:
    train(config, out=out, console=None, **options)


def figures(folder: Path) -> list[dict[str, Any]]:
    """Rows without what a clock or the process decides."""
    unsteady = {"time", "step_ms", "tokens_per_s", "peak_bytes"}
    return [{k: v for k, v in row.items() if k not in unsteady} for row in RunDirectory(folder).read_metrics()]


def weights(folder: Path) -> dict[str, list[float]]:
    """Every exported weight; a difference in any bit is one (fp32 is exact in Python's floats)."""
    return {name: tensor.flatten().tolist() for name, tensor in load_export(folder / "export")[0].items()}


def checkpoint_files(folder: Path, step: int) -> dict[str, Any]:
    """SHA-256 of every file of a checkpoint: parameters, optimizer, generators, data cursor."""
    manifest = json.loads((folder / "checkpoints" / f"step_{step:08d}" / "manifest.json").read_text())
    return {name: entry["sha256"] for name, entry in manifest["files"].items() if name != ".metadata"}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model": {"residual": "residual"}, "precision": "bf16"},
        {"model": {"residual": "hc"}, "micro_batch_size": 2},
        {"activation_checkpointing": True},
    ],
    ids=["mhc", "residual-bf16", "hc-accumulation", "checkpointing"],
)
def test_twenty_steps_are_ten_and_ten(change, tmp_path, changes):
    config = change(**changes)
    whole, crashing, resumed = Dice(), Dice(crash_at=13), Dice()
    go(config, tmp_path / "whole", extensions=[whole])
    with pytest.raises(CrashError):
        go(config, tmp_path / "parts", extensions=[crashing])
    go(config, tmp_path / "parts", extensions=[resumed], resume=True)
    assert resumed.draws == whole.draws[10:]
    assert figures(tmp_path / "parts") == figures(tmp_path / "whole")
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")
    assert checkpoint_files(tmp_path / "parts", 20) == checkpoint_files(tmp_path / "whole", 20)
    kinds = [(event["kind"], event["step"]) for event in RunDirectory(tmp_path / "parts").read_events()]
    assert ("resume", 10) in kinds


def test_a_killed_process_goes_on_exactly(change, tmp_path):
    """SIGKILL, whenever it happens to come, and a new process with the same command and --resume."""
    config = change(steps=36, checkpoint_every=3, validate_every=0, sample_tokens=0)
    go(config, tmp_path / "whole")
    (tmp_path / "c.toml").write_text(to_toml(config))
    command = [sys.executable, "-m", "laneway", "train", "--config", "c.toml", "--out", "run"]
    env = {**__import__("os").environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, env=env)
    latest, deadline = tmp_path / "run" / "latest", time.monotonic() + 120
    while not (latest.is_file() and process.poll() is None):
        assert time.monotonic() < deadline, "it never saved"
        if process.poll() is not None:
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = subprocess.run([*command, "--resume"], cwd=tmp_path, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    assert figures(tmp_path / "run") == figures(tmp_path / "whole")
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")


def crash(config: TrainConfig, out: Path, step: int = 8) -> None:
    with pytest.raises(CrashError):
        go(config, out, extensions=[Dice(crash_at=step)])


def test_another_configuration_is_refused_with_the_difference(change, tmp_path):
    crash(change(), tmp_path / "run")
    other = change(steps=30, optimizer={"lr": 1e-4}, model={"streams": 2})
    with pytest.raises(InputError) as caught:
        go(other, tmp_path / "run", extensions=[Dice()], resume=True)
    assert caught.value.field == "resume"
    for words in ("model.streams 4 → 2", "optimizer.lr 0.003 → 0.0001", "steps 20 → 30", "another --out"):
        assert words in str(caught.value)
    assert "batch_size" not in str(caught.value)
    go(change(), tmp_path / "run", extensions=[Dice()], resume=True)  # the refusal did no harm


def test_how_often_it_looks_may_change(change, tmp_path):
    go(change(), tmp_path / "whole", extensions=[Dice()])
    crash(change(), tmp_path / "run")
    go(
        change(log_every=1, probe_every=0, validate_every=7, checkpoint_every=3, sample_tokens=0),
        tmp_path / "run",
        extensions=[Dice()],
        resume=True,
    )
    losses = [[row["loss"] for row in figures(tmp_path / name)] for name in ("run", "whole")]
    assert losses[0] == losses[1]
    assert "notice" not in [event["kind"] for event in RunDirectory(tmp_path / "run").read_events()]


@pytest.mark.parametrize("changes", [{"micro_batch_size": 2}, {"activation_checkpointing": True}])
def test_the_layout_may_change_and_that_is_said(change, tmp_path, changes):
    go(change(), tmp_path / "whole", extensions=[Dice()])
    crash(change(), tmp_path / "run")
    go(change(**changes), tmp_path / "run", extensions=[Dice()], resume=True)
    losses = [[row["loss"] for row in figures(tmp_path / name)] for name in ("run", "whole")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    notices = [event["message"] for event in RunDirectory(tmp_path / "run").read_events() if event["kind"] == "notice"]
    assert [next(iter(changes)) in notice for notice in notices] == [True]


def test_without_a_checkpoint_it_begins_anew_and_says_so(change, tmp_path):
    go(change(), tmp_path / "whole", extensions=[Dice()])
    crash(change(), tmp_path / "run", step=3)
    go(change(), tmp_path / "run", extensions=[Dice()], resume=True)
    assert figures(tmp_path / "run") == figures(tmp_path / "whole")
    notices = [event["message"] for event in RunDirectory(tmp_path / "run").read_events() if event["kind"] == "notice"]
    assert any("begins anew" in notice for notice in notices)


def test_a_torn_checkpoint_is_passed_over(change, tmp_path):
    go(change(), tmp_path / "whole", extensions=[Dice()])
    crash(change(), tmp_path / "run", step=13)
    victim = max((tmp_path / "run" / "checkpoints" / "step_00000010").glob("*.distcp"), key=lambda path: path.stat().st_size)
    victim.write_bytes(victim.read_bytes()[:-100])
    go(change(), tmp_path / "run", extensions=[Dice()], resume=True)
    events = RunDirectory(tmp_path / "run").read_events()
    assert ("resume", 5) in [(event["kind"], event["step"]) for event in events]
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")


def test_resuming_a_finished_run_trains_no_further(change, tmp_path):
    go(change(), tmp_path / "run", extensions=[Dice()])
    before, rows = weights(tmp_path / "run"), figures(tmp_path / "run")
    result = train(change(), out=tmp_path / "run", resume=True, extensions=[Dice()], console=None)
    assert weights(tmp_path / "run") == before
    assert figures(tmp_path / "run") == rows
    assert result.steps == 20
    assert result.val_loss == rows[-1]["val_loss"]


def test_changed_text_is_refused(change, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the first text of this run\n" * 500)
    config = change(data={"path": str(text)})
    crash(config, tmp_path / "run")
    text.write_text("the other text of this run\n" * 500)
    with pytest.raises(LanewayError, match="the text has changed"):
        go(config, tmp_path / "run", extensions=[Dice()], resume=True)


def test_other_extensions_are_refused(change, tmp_path):
    crash(change(), tmp_path / "run")
    with pytest.raises(LanewayError, match="had 1 extensions, now there are 0"):
        go(change(), tmp_path / "run", resume=True)


def test_an_uncapped_run_can_be_resumed(change, tmp_path):
    """None has no word in TOML; the run's own file must still describe it."""
    config = change(model={"logit_cap": None})
    crash(config, tmp_path / "run")
    go(config, tmp_path / "run", extensions=[Dice()], resume=True)
    go(dataclasses.replace(config), tmp_path / "whole", extensions=[Dice()])
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")


def test_damaged_checkpoints_are_not_mistaken_for_none(change, tmp_path):
    """A run whose every checkpoint is torn must not begin anew over what is left of it."""
    config = change(steps=10, checkpoint_every=4)
    crash(config, tmp_path / "run")
    for file in (tmp_path / "run" / "checkpoints").glob("step_*/*.distcp"):
        file.write_bytes(file.read_bytes()[:-1])
    before = (tmp_path / "run" / "metrics" / "rank0.jsonl").read_bytes()
    with pytest.raises(LanewayError, match=r"every checkpoint in .* is damaged"):
        go(config, tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "metrics" / "rank0.jsonl").read_bytes() == before
