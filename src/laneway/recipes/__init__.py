"""Whole training runs as typed functions: read one, copy it, change it. A recipe's name is what `laneway train` takes."""

from collections.abc import Callable

from laneway.recipes.gpt2_124m import gpt2_124m
from laneway.recipes.small import small
from laneway.recipes.symptoms import CURES, LIMITS, memory_overflow, slow_convergence, unstable_start
from laneway.recipes.tiny import tiny
from laneway.train.config import TrainConfig

RECIPES: dict[str, Callable[[], TrainConfig]] = {
    "tiny": tiny,
    "small": small,
    "gpt2-124m": gpt2_124m,
    "unstable-start": unstable_start,
    "slow-convergence": slow_convergence,
    "memory-overflow": memory_overflow,
}
DEFAULT = "tiny"

__all__ = [
    "CURES",
    "DEFAULT",
    "LIMITS",
    "RECIPES",
    "gpt2_124m",
    "memory_overflow",
    "slow_convergence",
    "small",
    "tiny",
    "unstable_start",
]
