"""The size most published comparisons use. Needs a GPU (or several under torchrun) and your own text."""

from laneway.data.text import TextDataConfig
from laneway.models.gpt import GPTConfig
from laneway.train.config import OptimizerConfig, TrainConfig


def gpt2_124m() -> TrainConfig:
    """GPT-2 small (12 layers, 12 heads, width 768, context 1024; Radford et al. 2019) with mHC.

    The schedule is that of GPT-3 Small (Brown et al., arXiv 2005.14165, Table 2.1: lr 6e-4, batch of 0.5 M tokens, betas
    0.9/0.95, clip 1.0, weight decay 0.1, cosine to a tenth); 20 000 steps are about 10 B tokens. The vocabulary is GPT-2's
    50 257 rounded up to a multiple of 128: name its tokenizer.json and your text with `--data.tokenizer` and `--data.path`;
    until then the bytes of the standard library use the first 256 of it.
    """
    return TrainConfig(
        model=GPTConfig(vocab_size=50_304, context=1024, layers=12, heads=12, dim=768, ffn_dim=2048, residual="mhc", streams=4),
        data=TextDataConfig(path="stdlib", tokenizer="byte", validation_fraction=0.01),
        optimizer=OptimizerConfig(lr=6e-4, warmup=0.035, floor=0.1, beta2=0.95, weight_decay=0.1, clip_norm=1.0),
        steps=20_000,
        batch_size=512,
        micro_batch_size=8,
        precision="bf16",
        validate_every=250,
        validation_batches=2,
        checkpoint_every=1000,
        log_every=10,
        probe_every=100,
    )
