"""A disk that is full for one rank: no rank has the checkpoint, all go on, and the next one is whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import torchrun

from laneway.data.text import TextDataConfig
from laneway.models.gpt import GPTConfig
from laneway.rundir import RunDirectory
from laneway.train.config import TrainConfig
from laneway.train.settings import to_toml

pytestmark = pytest.mark.slow


@pytest.mark.timeout(240)
def test_both_ranks_go_on(text_file, tmp_path):
    config = TrainConfig(
        model=GPTConfig(context=32, layers=1, heads=2, dim=16),
        data=TextDataConfig(path=str(text_file), cache=str(text_file.parent / "cache"), validation_fraction=0.2),
        steps=12, batch_size=4, device="cpu", parallel="fsdp",
        probe_every=0, validate_every=0, checkpoint_every=3, sample_tokens=0,
    )  # fmt: skip
    (tmp_path / "c.toml").write_text(to_toml(config))
    torchrun(2, str(Path(__file__).with_name("full_disk.py")), "c.toml", "run", cwd=tmp_path)
    run = RunDirectory(tmp_path / "run")
    events = [(event["kind"], event["step"]) for event in run.read_events() if event["kind"].startswith("checkpoint")]
    assert events == [("checkpoint", 3), ("checkpoint_failed", 6), ("checkpoint", 9), ("checkpoint", 12)]
    for rank in (0, 1):
        assert [row["step"] for row in run.read_metrics(rank)] == list(range(1, 13))
