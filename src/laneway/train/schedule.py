"""Learning rate of a step: linear warm-up, then a cosine to a floor (Loshchilov and Hutter, arXiv 1608.03983)."""

from __future__ import annotations

import math

from laneway.train.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Learning rate of optimizer step ``step`` (1 … ``steps``); the last one has ``lr · floor``."""
    warmup = math.floor(config.warmup * steps)
    if step <= warmup:
        return config.lr * step / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return config.lr * (config.floor + (1 - config.floor) * 0.5 * (1 + math.cos(math.pi * done)))
