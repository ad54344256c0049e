"""A transformer encoder whose residual is a parameter: the trunk of the image model and of the one for images with text.

Pre-norm blocks as in the vision transformer (Dosovitskiy et al., arXiv 2010.11929), with RMSNorm: attention over the whole
sequence, then a GELU network. Each sub-layer sits at one site, as in the GPT.

Shapes: b batch, t sequence, n streams, c width (``dim``), h heads, d head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laneway.connections import expand_streams
from laneway.core import InputError
from laneway.models.gpt import RMSNorm
from laneway.models.residuals import StreamConfig


@dataclass(frozen=True)
class EncoderConfig(StreamConfig):
    """Shape of an encoder; ``mlp_dim=None`` means 4·dim, ``init_std=None`` 1/√dim."""

    dim: int = 64
    """Width C of one stream."""
    layers: int = 4
    """Blocks; each holds two sites (attention, MLP)."""
    heads: int = 4
    """Attention heads; dim must be a multiple of them."""
    mlp_dim: int | None = None
    """Hidden width of the MLP."""
    init_std: float | None = None
    """Standard deviation of weights, embeddings and positions; projections back into the streams: by 1/√(2·layers) smaller."""

    def problems(self, prefix: str = "model") -> list[InputError]:
        """Everything that is wrong with this configuration, one error a field."""
        found = super().problems(prefix) + self._bad_integers(prefix, "dim", "layers", "heads")
        if self.mlp_dim is not None:
            found += self._bad_integers(prefix, "mlp_dim")
        if not found and self.dim % self.heads:
            found.append(InputError(f"{prefix}.dim", self.dim, f"a multiple of heads = {self.heads}"))
        if self.init_std is not None and not 0 < self.init_std < float("inf"):
            found.append(InputError(f"{prefix}.init_std", self.init_std, "a number > 0"))
        return found

    @property
    def std(self) -> float:
        """Standard deviation at the start: 1/√dim keeps the size of what passes through a square matrix."""
        return self.init_std or self.dim**-0.5


class Attention(nn.Module):
    """Self-attention over the whole sequence, or over the part of it that ``valid`` marks."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.dim, 3 * config.dim)
        self.out = nn.Linear(config.dim, config.dim)

    def forward(self, x_btc: Tensor, valid_bt: Tensor | None = None) -> Tensor:
        """[b, t, c] → [b, t, c]; nothing is read from places where ``valid_bt`` is False."""
        b, t, c = x_btc.shape
        q, k, v = self.qkv(x_btc).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        mask = None if valid_bt is None else valid_bt[:, None, None, :]
        y_bhtd = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y_bhtd.transpose(1, 2).reshape(b, t, c))


class MLP(nn.Module):
    """out(gelu(up(x)))."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        hidden = config.mlp_dim or 4 * config.dim
        self.up = nn.Linear(config.dim, hidden)
        self.out = nn.Linear(hidden, config.dim)

    def forward(self, x_btc: Tensor) -> Tensor:
        """[b, t, c] → [b, t, c]."""
        return self.out(F.gelu(self.up(x_btc)))


class Block(nn.Module):
    """Two sites: attention and MLP, each behind its own RMSNorm."""

    def __init__(self, config: EncoderConfig, index: int) -> None:
        super().__init__()
        self.norm_attention = RMSNorm(config.dim, eps=config.norm_eps)
        self.norm_mlp = RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.mlp = MLP(config)
        self.site_attention = config.site(config.dim, 2 * index)
        self.site_mlp = config.site(config.dim, 2 * index + 1)

    def forward(self, x_btnc: Tensor, valid_bt: Tensor | None = None) -> Tensor:
        """[b, t, n, c] → the same shape."""
        h_btc, merge = self.site_attention(x_btnc)
        x_btnc = merge(self.attention(self.norm_attention(h_btc), valid_bt))
        h_btc, merge = self.site_mlp(x_btnc)
        return merge(self.mlp(self.norm_mlp(h_btc)))


class Encoder(nn.Module):
    """[b, t, c] → [b, t, c], through ``streams`` residual streams and a last RMSNorm, for a configuration that was checked."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.streams, self.spread = config.used_streams, config.spread
        self.blocks = nn.ModuleList(Block(config, index) for index in range(config.layers))
        self.readout = config.readout(config.dim)
        self.norm = RMSNorm(config.dim, eps=config.norm_eps)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                scale = (2 * config.layers) ** -0.5 if name.endswith(".out") else 1.0
                nn.init.normal_(module.weight, std=config.std * scale)
                nn.init.zeros_(module.bias)

    def forward(self, x_btc: Tensor, valid_bt: Tensor | None = None) -> Tensor:
        """Embeddings [b, t, c] → features [b, t, c]; places where ``valid_bt`` is False are read by no other."""
        if torch.is_autocast_enabled(x_btc.device.type):  # narrow streams; maps stay fp32
            x_btc = x_btc.to(torch.get_autocast_dtype(x_btc.device.type))
        x_btnc = expand_streams(x_btc, self.streams, spread=self.spread)
        for block in self.blocks:
            x_btnc = block(x_btnc, valid_bt)
        return self.norm(self.readout(x_btnc))
