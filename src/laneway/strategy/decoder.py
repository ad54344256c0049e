"""A decoder of any ``Architecture``: this package's GPT, with grouped-query attention or an ungated feed-forward where asked."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laneway.cluster.architecture import Architecture
from laneway.connections.schedule import Schedule, add_scheduler
from laneway.core import InputError
from laneway.models.gpt import GPT, Attention, GPTConfig, rotate

__all__ = ["decoder"]


class GroupedAttention(Attention):
    """Causal attention whose ``kv_heads`` heads of keys and values each serve several queries (arXiv 2305.13245)."""

    def __init__(self, config: GPTConfig, kv_heads: int) -> None:
        super().__init__(config)
        self.kv_heads = kv_heads
        self.qkv = nn.Linear(config.dim, config.dim + 2 * kv_heads * self.head_dim, bias=False)

    def attend(self, qkv_bte: Tensor, rotary: Tensor) -> Tensor:
        """[b, t, (h + 2·kv)·d] → [b, t, h·d], over as many heads as it is given."""
        heads = qkv_bte.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        per_key = self.heads // self.kv_heads
        groups = heads.shape[1] // (per_key + 2)
        q, k, v = heads.split([per_key * groups, groups, groups], dim=1)
        k, v = (part.repeat_interleave(per_key, dim=1) for part in (rotate(k, rotary), v))
        return F.scaled_dot_product_attention(rotate(q, rotary), k, v, is_causal=True).transpose(1, 2).flatten(2)


class FeedForward(nn.Module):
    """out(gelu(up(x)))."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.dim, config.hidden, bias=False)
        self.out = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x_btc: Tensor) -> Tensor:
        """[b, t, c] → [b, t, c]."""
        return self.out(F.gelu(self.up(x_btc)))


def decoder(arch: Architecture, *, context: int = 2048, device: torch.device | str = "meta") -> GPT:
    """A GPT of this architecture, with rotary positions and without biases.

    Raises:
        InputError: experts, or sizes that do not fit each other.
    """
    if arch.experts:
        raise InputError("arch.experts", arch.experts, "0: this package's GPT is dense")
    if arch.kv_heads < 1 or arch.heads % arch.kv_heads:
        raise InputError("arch.kv_heads", arch.kv_heads, f"a divisor of heads = {arch.heads}")
    residual = "residual" if arch.streams == 1 else "mhc"
    config = GPTConfig(
        arch.vocab, context, arch.layers, arch.heads, arch.hidden, arch.ffn, residual=residual, streams=arch.streams
    )
    with torch.device(device):
        model = GPT(config)
        for block in model.blocks:
            if arch.kv_heads != arch.heads:
                block.attention = GroupedAttention(config, arch.kv_heads)
            if not arch.gated:
                block.ffn = FeedForward(config)
        if not arch.tied:
            model.head = nn.Linear(arch.hidden, arch.vocab, bias=False)
        if arch.scheduler and arch.streams > 1:
            add_scheduler(model, Schedule(features=arch.scheduler, damping=0.0))  # damping has no parameters
    model._initialise()
    return model
