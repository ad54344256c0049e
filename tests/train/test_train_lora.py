"""Adapters in the training step's own parts: the check is an extension, and both go through a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from laneway import ConsistencyCheck, add_lora
from laneway.checkpoint import CheckpointStore
from laneway.connections.consistency import ConsistencyError
from laneway.connections.lora import lora_state_dict
from laneway.data.text import TextDataConfig
from laneway.models.gpt import GPTConfig
from laneway.rundir import RunDirectory
from laneway.train.config import TrainConfig
from laneway.train.ranks import ranks_of_run
from laneway.train.resume import load_state, save_state
from laneway.train.step import Stepper
from laneway.train.workbench import Workbench, build, make_optimizer

pytestmark = pytest.mark.usefixtures("one_thread")
SAMPLE = torch.arange(64).view(2, 32) % 256


def config_for(text: Path) -> TrainConfig:
    return TrainConfig(
        model=GPTConfig(layers=1, heads=2, dim=16, context=32, init_std=0.2),
        data=TextDataConfig(path=str(text), cache=str(text.parent / "cache")),
        steps=4,
        batch_size=2,
        validation_batches=1,
        device="cpu",
    )


@contextmanager
def desk(text: Path) -> Iterator[tuple[Workbench, ConsistencyCheck]]:
    """A run's parts with adapters in the model and the check begun."""
    config = config_for(text)
    with ranks_of_run("cpu") as ranks:
        bench = build(config, ranks)
        check = ConsistencyCheck(bench.parallel.model, SAMPLE, "stop", every=2)
        add_lora(bench.parallel.model, ["attention.qkv", "site_ffn.fn"], rank=2)
        check.begin()
        optimizer = make_optimizer(bench.parallel, config.optimizer)
        stepper = Stepper(bench.parallel, optimizer, ranks, config.batch_size, config.optimizer.clip_norm)
        yield replace(bench, optimizer=optimizer, stepper=stepper), check


def steps(bench: Workbench, check: ConsistencyCheck, numbers: range) -> list[dict[str, float]]:
    rows = []
    for step in numbers:
        check.on_step_begin(step)
        outcome = bench.stepper(next(bench.loader), 1e-2, False, lambda step=step: check.on_backward_end(step))
        rows.append({"loss": outcome.loss})
        check.on_step_end(step, rows[-1])
    return rows


def test_a_resumed_fine_tune_goes_on_bit_for_bit_and_raises_no_alarm(text_file, tmp_path):
    with desk(text_file) as (bench, check):
        straight = steps(bench, check, range(1, 5))
        whole = {name: t.clone() for name, t in lora_state_dict(bench.parallel.model).items()}
    store = CheckpointStore(RunDirectory(tmp_path / "run"), 2)
    with desk(text_file) as (bench, check):
        steps(bench, check, range(1, 3))
        save_state(store, 2, bench, [check])
    with desk(text_file) as (bench, check):
        load_state(store, 2, bench, [check])
        assert steps(bench, check, range(3, 5)) == straight[2:]
        assert check.findings == []
        assert all(torch.equal(t, whole[name]) for name, t in lora_state_dict(bench.parallel.model).items())
    assert "lora_contribution" in straight[1]


def test_a_base_that_changed_since_the_checkpoint_stops_the_resume(text_file, tmp_path):
    store = CheckpointStore(RunDirectory(tmp_path / "run"), 2)
    with desk(text_file) as (bench, check):
        steps(bench, check, range(1, 3))
        save_state(store, 2, bench, [check])
    with desk(text_file) as (bench, check):
        bench.parallel.model.norm.eps = 0.1
        with pytest.raises(ConsistencyError, match="head: base"):
            load_state(store, 2, bench, [check])


def test_a_step_that_is_not_finite_is_named_before_the_update(text_file):
    with desk(text_file) as (bench, check):
        qkv = bench.parallel.model.blocks[0].attention.qkv
        qkv.lora.B.register_hook(lambda gradient: gradient / 0)
        with pytest.raises(ConsistencyError, match=r"step 1: blocks\.0\.attention\.qkv: gradient"):
            steps(bench, check, range(1, 2))
        assert not qkv.lora.B.any()
