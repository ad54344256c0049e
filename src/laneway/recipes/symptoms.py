"""Three runs that go wrong on purpose, each with what cures it: for `laneway doctor` to recognise, in seconds on a CPU.

    laneway train unstable-start --out sick       laneway doctor sick
    laneway train unstable-start --out well --optimizer.lr 0.1

``CURES`` holds what doctor's first knob comes to, turned as often as it asks for. `laneway bench symptoms` does that.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from laneway.models.gpt import GPTConfig
from laneway.train.config import OptimizerConfig, TrainConfig

CURES: dict[str, dict[str, Any]] = {
    "unstable-start": {"optimizer.lr": 0.1},
    "slow-convergence": {"optimizer.lr": 0.01},
    "memory-overflow": {"micro_batch_size": 32},
}
"""By recipe: what to turn, and to which value."""

LIMITS: dict[str, int] = {"memory-overflow": 200 << 20}
"""By recipe: bytes of tensors under which it shows its symptom, and no longer does once it is cured."""


def _small(optimizer: OptimizerConfig) -> TrainConfig:
    return TrainConfig(
        model=GPTConfig(layers=2, heads=2, dim=16, context=32, residual="mhc", streams=4),
        optimizer=optimizer,
        steps=120,
        batch_size=4,
        validate_every=0,
        validation_batches=2,
        checkpoint_every=0,
        sample_tokens=0,
    )


def unstable_start() -> TrainConfig:
    """A learning rate far too high from the first step on: no warm-up, no clipping. The loss leaps over its start."""
    return _small(OptimizerConfig(lr=1.0, warmup=0.0, clip_norm=0.0))


def slow_convergence() -> TrainConfig:
    """A learning rate far too low: after all steps not even the frequencies of the bytes are learnt."""
    return _small(OptimizerConfig(lr=1e-4, warmup=0.1))


def memory_overflow() -> TrainConfig:
    """One micro-batch that holds the whole batch: its activations need hundreds of megabytes where a few do.

    It shows on a device, or under a limit (``LIMITS``), with less than that.
    """
    config = _small(OptimizerConfig(lr=0.01, warmup=0.1))
    return replace(
        config, model=replace(config.model, context=256, dim=32), steps=1, batch_size=64, validation_batches=1, probe_every=0
    )
