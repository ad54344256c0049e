"""The two networks of ``laneway bench memory``: plain PyTorch, as people write them, with nothing of laneway in them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Size:
    """Shape of a network and of its batch."""

    layers: int = 8
    dim: int = 384
    heads: int = 6
    vocabulary: int = 4096
    length: int = 256
    batch: int = 8
    longest: int = 6
    """Times the length: how long a sequence may be."""


SIZES = {
    "full": Size(),
    "half": Size(layers=6, dim=256, heads=4, vocabulary=2048, length=192, batch=6),
    "small": Size(layers=4, dim=192, heads=6, vocabulary=1024, length=128),
    "quick": Size(layers=4, dim=128, heads=4, vocabulary=512, length=128),
}


class GPT2(nn.Module):
    """LayerNorm, GELU, learned positions (Radford et al. 2019)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.dim)
        self.positions = nn.Parameter(0.02 * torch.randn(size.longest * size.length, size.dim))
        self.blocks = nn.ModuleList(GPT2Block(size) for _ in range(size.layers))
        self.norm, self.head = nn.LayerNorm(size.dim), nn.Linear(size.dim, size.vocabulary, bias=False)

    def forward(self, tokens_bt: Tensor) -> Tensor:
        """Logits [b, t, v]."""
        x = self.embedding(tokens_bt) + self.positions[: tokens_bt.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class GPT2Block(nn.Module):
    """Attention and a two-layer perceptron, each behind a LayerNorm."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm1, self.norm2 = nn.LayerNorm(size.dim), nn.LayerNorm(size.dim)
        self.qkv, self.out = nn.Linear(size.dim, 3 * size.dim), nn.Linear(size.dim, size.dim)
        self.up, self.act, self.down = nn.Linear(size.dim, 4 * size.dim), nn.GELU(), nn.Linear(4 * size.dim, size.dim)

    def forward(self, x: Tensor) -> Tensor:
        """[b, t, c] → the same."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        found: Tensor = x + self.down(self.act(self.up(self.norm2(x))))
        return found


class UnfusedRMSNorm(nn.Module):
    """x / rms(x) · weight, op by op, as transformers' Llama has it."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Over the last dim, in fp32."""
        y = x.float()
        return self.weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Llama(nn.Module):
    """Unfused RMSNorm, rotary positions, grouped keys and values, SwiGLU (Touvron et al. 2023)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.dim)
        self.blocks = nn.ModuleList(LlamaBlock(size) for _ in range(size.layers))
        self.norm, self.head = UnfusedRMSNorm(size.dim), nn.Linear(size.dim, size.vocabulary, bias=False)
        angles = torch.arange(size.longest * size.length)[:, None] * 10000.0 ** -torch.linspace(0, 1, size.dim // size.heads // 2)
        self.register_buffer("rotary", torch.cat([angles.cos(), angles.sin()], -1), persistent=False)
        self.rotary: Tensor

    def forward(self, tokens_bt: Tensor) -> Tensor:
        """Logits [b, t, v]."""
        x = self.embedding(tokens_bt)
        for block in self.blocks:
            x = block(x, self.rotary[: tokens_bt.shape[1]])
        logits: Tensor = self.head(self.norm(x))
        return logits


class LlamaBlock(nn.Module):
    """Attention with rotary positions, and a gated perceptron; two or three heads share their keys and values."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        hidden = 8 * size.dim // 3 // 32 * 32
        self.heads, self.shared = size.heads, 3 if size.heads % 3 == 0 else 2 if size.heads % 2 == 0 else 1
        narrow = size.dim // self.shared
        self.norm1, self.norm2 = UnfusedRMSNorm(size.dim), UnfusedRMSNorm(size.dim)
        self.q, self.out = (nn.Linear(size.dim, size.dim, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(size.dim, narrow, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(size.dim, hidden, bias=False) for _ in range(2))
        self.act, self.down = nn.SiLU(), nn.Linear(hidden, size.dim, bias=False)

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        """[b, t, c] → the same."""
        h = self.norm1(x)
        q = self.q(h).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (part(h).unflatten(-1, (self.heads // self.shared, -1)).transpose(1, 2) for part in (self.k, self.v))
        k, v = (part.repeat_interleave(self.shared, 1) for part in (_turned(k, rotary), v))
        y = F.scaled_dot_product_attention(_turned(q, rotary), k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        found: Tensor = x + self.down(self.act(self.gate(h)) * self.up(h))
        return found


def _turned(x: Tensor, rotary: Tensor) -> Tensor:
    cos, sin = rotary.chunk(2, -1)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)


MODELS: dict[str, type[nn.Module]] = {"gpt": GPT2, "llama": Llama}
