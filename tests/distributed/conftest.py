"""A run of ten steps whose batch divides among two ranks and their micro-batches."""

from __future__ import annotations

from pathlib import Path

import pytest
from netlab import lab

from laneway.data.text import TextDataConfig
from laneway.models.gpt import GPTConfig
from laneway.train.config import OptimizerConfig, TrainConfig

__all__ = ["lab"]


@pytest.fixture(autouse=True, scope="module")
def _one_thread(one_thread: None) -> None:
    """As the started processes have: sums then come in the same order within each."""


@pytest.fixture(scope="session")
def small(text_file: Path) -> TrainConfig:
    return TrainConfig(
        model=GPTConfig(context=32, layers=2, heads=2, dim=16, streams=4),
        data=TextDataConfig(path=str(text_file), cache=str(text_file.parent / "cache"), validation_fraction=0.2),
        optimizer=OptimizerConfig(lr=1e-2, warmup=0.1, clip_norm=0.5),
        steps=10,
        batch_size=4,
        device="cpu",
        validate_every=5,
        validation_batches=3,
        checkpoint_every=5,
        probe_every=5,
        sample_prompt="the ",
        sample_tokens=8,
    )
