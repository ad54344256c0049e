"""The default: minutes on two CPU cores, from text that every Python brings along."""

from laneway.data.text import TextDataConfig
from laneway.models.gpt import GPTConfig
from laneway.train.config import OptimizerConfig, TrainConfig


def tiny() -> TrainConfig:
    """A byte-level GPT with mHC on the standard library's sources.

    Chosen by measurement on two cores: short sequences keep attention cheap and small batches give many updates. Learning rates
    of 5e-3 and 1e-2, tried with GPT-2's initial deviation of 0.02, ended far higher than 3e-3 with 0.05.
    benchmarks/results/tiny_run.csv holds the curve.
    """
    return TrainConfig(
        model=GPTConfig(vocab_size=256, context=128, layers=4, heads=4, dim=128, residual="mhc", streams=4, init_std=0.05),
        data=TextDataConfig(path="stdlib", tokenizer="byte"),
        optimizer=OptimizerConfig(lr=3e-3, warmup=0.05, floor=0.05, beta2=0.95, weight_decay=0.1, clip_norm=1.0),
        steps=700,
        batch_size=8,
        validate_every=100,
        validation_batches=64,
        checkpoint_every=350,
        probe_every=25,
        sample_tokens=200,
    )
