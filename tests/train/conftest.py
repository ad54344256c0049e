"""A corpus of a few kilobytes and a run that takes seconds, for everything that trains in a test."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from laneway.data.text import TextDataConfig
from laneway.models.gpt import GPTConfig
from laneway.train.config import OptimizerConfig, TrainConfig

WORDS = "the stream runs over wide stones and the lane keeps every number in its place while rows sum to one".split()


def pseudo_text(size: int, seed: int = 1) -> str:
    """Sentences from a linear congruential generator: the same on every machine and in every version."""
    state, parts, length = seed, [], 0
    while length < size:
        state = (state * 1103515245 + 12345) % 2**31
        word = WORDS[state // 65536 % len(WORDS)]
        parts.append(word + (".\n" if state // 65536 % 11 == 0 else " "))
        length += len(parts[-1])
    return "".join(parts)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tests share the machine; one thread is also what makes sums come out the same."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(pseudo_text(40_000), "utf-8")
    return path


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
