"""A larger byte-level model, meant for one accelerator."""

from laneway.data.text import TextDataConfig
from laneway.models.gpt import GPTConfig
from laneway.train.config import OptimizerConfig, TrainConfig


def small() -> TrainConfig:
    """A byte-level GPT of about 25 M parameters.

    Learning rate and batch follow nanoGPT's character-level configuration scaled to this width (lr 1e-3 at dim 384, batch of
    16 k tokens, betas 0.9/0.99); the warm-up and the floor of a tenth are those of Chinchilla (Hoffmann et al.,
    arXiv 2203.15556). bf16 halves the traffic of the streams.
    """
    return TrainConfig(
        model=GPTConfig(vocab_size=256, context=512, layers=8, heads=8, dim=512, residual="mhc", streams=4),
        data=TextDataConfig(path="stdlib", tokenizer="byte"),
        optimizer=OptimizerConfig(lr=1e-3, warmup=0.04, floor=0.1, beta2=0.99, weight_decay=0.1, clip_norm=1.0),
        steps=5000,
        batch_size=64,
        precision="bf16",
        validate_every=250,
        validation_batches=8,
        checkpoint_every=1000,
        probe_every=50,
    )
