"""A run with a memory budget: the same curve bit for bit, figures in its rows, what was done beside it; flags and variables."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from pathlib import Path

import pytest
import torch

from laneway.checkpoint import CheckpointStore
from laneway.cli.train import read_request
from laneway.core import Extension, InputError
from laneway.memory.config import MemoryConfig
from laneway.memory.manage import exact_meter
from laneway.rundir import RunDirectory
from laneway.train.config import OptimizerConfig, TrainConfig
from laneway.train.loop import train


@pytest.fixture
def config(config: TrainConfig) -> TrainConfig:
    """A run with more to move and fewer steps than the other tests' one."""
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, context=64, layers=3, dim=48),
        optimizer=OptimizerConfig(lr=1e-2, warmup=0.1),
        steps=6,
        seed=0,
        micro_batch_size=4,
        validate_every=3,
        validation_batches=1,
        checkpoint_every=3,
        probe_every=3,
        sample_tokens=0,
    )


def managed(config: TrainConfig, tmp_path: Path, extra: int, **fields) -> TrainConfig:
    budget = exact_meter(torch.device("cpu")).live() + extra
    return dataclasses.replace(config, memory=MemoryConfig(str(budget), folder=str(tmp_path), min_bytes=8192, **fields))


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in RunDirectory(run).read_metrics()]


def without_the_last_checkpoint(run: Path) -> None:
    store = CheckpointStore(RunDirectory(run))
    for path in sorted(store.folder(6).rglob("*"), reverse=True):
        path.unlink()
    store.folder(6).rmdir()


@pytest.mark.parametrize("changes", [{}, {"activation_checkpointing": True}, {"recompute_streams": True}, {"precision": "bf16"}])
def test_the_curve_is_bit_for_bit_the_same(config, tmp_path, changes):
    config = dataclasses.replace(config, **changes)
    train(config, out=tmp_path / "plain", console=None)
    train(managed(config, tmp_path, 3 << 20), out=tmp_path / "managed", console=None)
    assert losses(tmp_path / "managed") == losses(tmp_path / "plain")
    rows = RunDirectory(tmp_path / "managed").read_metrics()
    assert sum(row["memory_bytes_out"] for row in rows) > 0
    assert all(row["memory_peak_bytes"] > 0 for row in rows)
    assert not any("memory_bytes_out" in row for row in RunDirectory(tmp_path / "plain").read_metrics())
    told = json.loads(RunDirectory(tmp_path / "managed").memory.read_text())
    assert told["plans"]
    assert len(told["passes"]) == 12
    assert not RunDirectory(tmp_path / "plain").memory.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["managed", "plain"]  # the tier's file is gone


def test_a_run_may_go_on_with_another_budget_and_stay_the_same(config, tmp_path):
    train(config, out=tmp_path / "plain", console=None)
    run = tmp_path / "managed"
    train(config, out=run, console=None)
    without_the_last_checkpoint(run)
    train(managed(config, tmp_path, 3 << 20), out=run, resume=True, console=None)
    assert losses(run) == losses(tmp_path / "plain")


def test_flags_variables_and_their_order(monkeypatch, tmp_path):
    assert read_request(["tiny"]).settings.memory == MemoryConfig()
    short = read_request(["tiny", "--memory-budget", "1.5GiB", "--memory-policy", "lru"]).settings.memory
    assert (short.budget, short.policy) == ("1.5GiB", "lru")
    monkeypatch.setenv("MHC_EVICTION_STRATEGY", "fifo")
    monkeypatch.setenv("MHC_MAX_SWAP_OPS_PER_SEC", "100")
    memory = read_request(["tiny", "--memory.policy", "lru"]).settings.memory
    assert (memory.policy, memory.max_swap_ops_per_second) == ("lru", 100)
    (tmp_path / "c.toml").write_text('[memory]\npolicy = "cost_aware"\n')
    assert read_request(["tiny", "--config", str(tmp_path / "c.toml")]).settings.memory.policy == "cost_aware"
    monkeypatch.setenv("MHC_EVICTION_STRATEGY", "oldest")
    with pytest.raises(InputError, match="MHC_EVICTION_STRATEGY: got 'oldest'"):
        read_request(["tiny"])


def test_a_wrong_budget_is_refused_by_name(config, tmp_path):
    with pytest.raises(InputError, match=r"memory\.budget: got 'much'"):
        train(dataclasses.replace(config, memory=MemoryConfig("much")), out=tmp_path / "run", console=None)
    assert not (tmp_path / "run").exists()


def test_optimizer_state_in_the_tier_changes_no_bit_and_survives_a_resume(config, tmp_path):
    train(config, out=tmp_path / "plain", console=None)
    streamed = managed(config, tmp_path, 3 << 20, optimizer_state="streamed")
    run = tmp_path / "managed"
    train(streamed, out=run, console=None)
    assert losses(run) == losses(tmp_path / "plain")
    assert json.loads(RunDirectory(run).memory.read_text())["tier"]["bytes_written"] > 0
    without_the_last_checkpoint(run)
    train(streamed, out=run, resume=True, console=None)
    assert losses(run) == losses(tmp_path / "plain")


def test_coded_saved_tensors_come_near_tell_their_error_and_are_another_run(config, tmp_path):
    train(config, out=tmp_path / "plain", console=None)
    run, coded = tmp_path / "managed", managed(config, tmp_path, 3 << 20, saved_tensors="int8")
    train(coded, out=run, console=None)
    assert losses(run) == pytest.approx(losses(tmp_path / "plain"), rel=0.01)
    rows = RunDirectory(run).read_metrics()
    assert any(0 < row.get("memory_coding_error", 0) <= row["memory_coding_error_max"] < 0.02 for row in rows)
    assert json.loads(RunDirectory(run).memory.read_text())["saved_tensors"] == "int8"
    without_the_last_checkpoint(run)
    with pytest.raises(InputError, match=r"memory\.saved_tensors int8 → exact"):
        train(managed(config, tmp_path, 3 << 20), out=run, resume=True, console=None)
    train(coded, out=run, resume=True, console=None)


class Stopping(Extension):
    """Asks the run to stop; it does so after the next step, which validates."""

    def on_step_end(self, step: int, metrics: dict) -> None:
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    def state_dict(self) -> dict:
        return {}


def test_gradients_and_parameters_in_the_tier_change_no_bit_through_a_stop_and_a_resume(config, tmp_path):
    config = dataclasses.replace(config, sample_tokens=8, checkpoint_every=0)
    train(config, out=tmp_path / "plain", console=None)
    parts = managed(config, tmp_path, 3 << 20, gradients="parked", parameters="streamed", replay=False)
    run = tmp_path / "managed"
    stopped = train(parts, out=run, console=None, extensions=[Stopping()])
    assert (stopped.steps, stopped.stopped) == (3, "SIGTERM")
    train(parts, out=run, resume=True, console=None, extensions=[Stopping()])
    assert losses(run) == losses(tmp_path / "plain")
    told = json.loads(RunDirectory(run).memory.read_text())
    assert told["gradients"]["peak"] > 0
    assert told["parameters"]["peak"] > 0


@pytest.mark.parametrize(("field", "value"), [("gradients", "parked"), ("parameters", "streamed")])
def test_gradients_and_parameters_move_only_where_nobody_else_looks_after_them(config, field, value):
    def problems(ranks: int = 1, compiled: bool = False, **fields) -> list[str]:
        memory = MemoryConfig("1GiB", **{field: value}, **fields)
        changed = dataclasses.replace(config, batch_size=8, memory=memory, compile=compiled)
        return [str(problem) for problem in changed.problems(ranks) if problem.field == f"memory.{field}"]

    assert problems(replay=False) == []
    (told,) = problems()
    assert told == f"memory.{field}: got '{value}'; accepted: resident beside replay; --memory.replay false"
    assert "beside 2 ranks" in problems(2, replay=False)[0]
    assert "beside replay and compile" in problems(compiled=True)[0]
