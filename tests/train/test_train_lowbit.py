"""A run whose optimizer has moments of few bits: with and without a budget, resumed exactly, and not resumed as another run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from laneway.checkpoint import CheckpointStore
from laneway.core import InputError
from laneway.memory.config import MemoryConfig
from laneway.memory.manage import exact_meter
from laneway.rundir import RunDirectory
from laneway.train.config import OptimizerConfig, TrainConfig
from laneway.train.loop import train


@pytest.fixture
def config(config: TrainConfig) -> TrainConfig:
    """A run with matrices that are large enough to be held in few bits."""
    model = dataclasses.replace(config.model, context=32, layers=2, dim=64)
    return dataclasses.replace(
        config, model=model, optimizer=OptimizerConfig(lr=1e-2, warmup=0.1), steps=4, seed=0, validate_every=4,
        validation_batches=1, checkpoint_every=2, probe_every=4, sample_tokens=0,
    )  # fmt: skip


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in RunDirectory(run).read_metrics()]


def without_the_last_checkpoint(run: Path) -> None:
    store = CheckpointStore(RunDirectory(run))
    for path in sorted(store.folder(4).rglob("*"), reverse=True):
        path.unlink()
    store.folder(4).rmdir()


def test_it_is_another_run_resumed_exactly_wherever_the_state_is(config, tmp_path):
    train(config, out=tmp_path / "plain", console=None)
    few = dataclasses.replace(config, memory=MemoryConfig(optimizer_bits=8))
    run = tmp_path / "few"
    train(few, out=run, console=None)
    found = losses(run)
    assert found != losses(tmp_path / "plain")
    assert found == pytest.approx(losses(tmp_path / "plain"), rel=0.02)
    without_the_last_checkpoint(run)
    budget = str(exact_meter(torch.device("cpu")).live() + (64 << 20))
    streamed = MemoryConfig(budget, folder=str(tmp_path), optimizer_bits=8, optimizer_state="streamed")
    train(dataclasses.replace(config, memory=streamed), out=run, resume=True, console=None)
    assert losses(run) == found
    with pytest.raises(InputError, match=r"memory\.optimizer_bits 8 → 32"):
        train(config, out=run, resume=True, console=None)
