"""A run that takes seconds, with everything switched on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from laneway.data.text import TextDataConfig
from laneway.models.gpt import GPTConfig
from laneway.train.config import OptimizerConfig, TrainConfig


@pytest.fixture(autouse=True, scope="module")
def _one_thread(one_thread: None) -> None:
    pass


@pytest.fixture
def config(text_file: Path) -> TrainConfig:
    """Twenty small steps with everything switched on."""
    return TrainConfig(
        model=GPTConfig(context=32, layers=2, heads=2, dim=16, streams=4),
        data=TextDataConfig(path=str(text_file), cache=str(text_file.parent / "cache"), validation_fraction=0.2),
        optimizer=OptimizerConfig(lr=3e-3, warmup=0.2),
        steps=20,
        batch_size=8,
        seed=3,
        device="cpu",
        validate_every=10,
        validation_batches=2,
        checkpoint_every=5,
        probe_every=10,
        sample_prompt="the ",
        sample_tokens=12,
    )


Change = Callable[..., TrainConfig]


@pytest.fixture
def change(config: TrainConfig) -> Change:
    """The configuration with other values: ``change(steps=3, model={"residual": "hc"})``."""

    def changed(**fields: object) -> TrainConfig:
        for name, value in fields.items():
            if isinstance(value, dict):
                fields[name] = dataclasses.replace(getattr(config, name), **value)
        return dataclasses.replace(config, **fields)

    return changed
