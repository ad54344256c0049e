"""The default: minutes on two CPU cores, from text that every Python brings along."""

from laneway.data.text import TextDataConfig
from laneway.models.gpt import GPTConfig
from laneway.train.config import OptimizerConfig, TrainConfig


def tiny() -> TrainConfig:
    """A byte-level GPT with mHC on the standard library's sources."""
    return TrainConfig(
        model=GPTConfig(vocab_size=256, context=256, layers=4, heads=4, dim=128, residual="mhc", streams=4),
        data=TextDataConfig(path="stdlib", tokenizer="byte"),
        optimizer=OptimizerConfig(lr=3e-3, warmup=0.1, floor=0.05, beta2=0.95, weight_decay=0.1, clip_norm=1.0),
        steps=500,
        batch_size=8,
        validate_every=125,
        validation_batches=16,
        checkpoint_every=250,
        probe_every=25,
        sample_tokens=200,
    )
