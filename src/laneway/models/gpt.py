"""A decoder-only language model whose residual is a parameter.

RMSNorm, rotary positions, scaled-dot-product attention, SwiGLU, a head tied to the embedding. Every sub-layer sits at one
**site**: with ``residual="residual"`` a site is the plain ``x + f(norm(x))``; with any other choice it is a hyper-connection
over ``streams`` residual streams. At the start all choices compute the same function of the same weights (see docs/start.md;
``hc``, which sums its streams, up to the last norm's epsilon), so runs that differ only in ``residual`` and share a seed begin
from the same network.

Shapes: b batch, t time, n streams, c width (``dim``), h heads, d head width, v vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laneway.connections import HyperConnection, StreamChain, StreamReadout, expand_spread, expand_streams
from laneway.core import InputError, choice, collect, positive_int, problems_of

# The residual choices by their usual names, and the manifold of H_res that each stands for.
RESIDUALS = {
    "residual": None,
    "hc": "none",
    "mhc": "sinkhorn",
    "mhc-lite": "birkhoff",
    "kronecker": "kronecker",
    "orthogonal": "orthogonal",
    "identity": "identity",
}


@dataclass(frozen=True)
class GPTConfig:
    """Shape of a GPT; ``ffn_dim=None`` means 8/3 of ``dim`` rounded up to a multiple of 32."""

    vocab_size: int = 256
    """Number of tokens; 256 for bytes."""
    context: int = 256
    """Longest sequence in tokens."""
    layers: int = 4
    """Blocks; each holds two sites (attention, SwiGLU)."""
    heads: int = 4
    """Attention heads; dim / heads must be even (rotary positions)."""
    dim: int = 128
    """Width C of one stream."""
    ffn_dim: int | None = None
    """Hidden width of the SwiGLU."""
    residual: str = "mhc"
    """residual | hc | mhc | mhc-lite | kronecker | orthogonal | identity"""
    streams: int = 4
    """Residual streams n; 1 is the plain residual."""
    sinkhorn_iterations: int = 20
    """Sinkhorn iterations of mhc."""
    logit_cap: float | None = 8.0
    """H_res logits pass through c·tanh(h/c); None: uncapped. TOML has no null: write 0 for none."""
    norm_eps: float = 1e-6
    """Epsilon of every RMSNorm."""
    rope_base: float = 10_000.0
    """Base of the rotary frequencies."""
    init_std: float = 0.02
    """Standard deviation of the weights at the start; projections back into the streams are scaled by 1/√(2·layers)."""

    def problems(self, prefix: str = "model") -> list[InputError]:
        """Everything that is wrong with this configuration, one error a field."""
        return problems_of(self, f"{prefix}.", lambda sound: sound._out_of_range(prefix))

    def _out_of_range(self, prefix: str) -> list[InputError]:
        found: list[InputError] = []
        for name in ("vocab_size", "context", "layers", "heads", "dim", "streams", "sinkhorn_iterations"):
            found += collect([lambda name=name: positive_int(f"{prefix}.{name}", getattr(self, name))])
        if self.ffn_dim is not None:
            found += collect([lambda: positive_int(f"{prefix}.ffn_dim", self.ffn_dim)])
        found += collect([lambda: choice(f"{prefix}.residual", self.residual, RESIDUALS)])
        if not found and (self.dim % self.heads or (self.dim // self.heads) % 2):
            accepted = f"a multiple of 2·heads = {2 * self.heads}"
            found.append(InputError(f"{prefix}.dim", self.dim, accepted))
        for name in ("norm_eps", "rope_base", "init_std"):
            if not 0 < getattr(self, name) < float("inf"):
                found.append(InputError(f"{prefix}.{name}", getattr(self, name), "a number > 0"))
        if self.logit_cap is not None and not 0 <= self.logit_cap < float("inf"):
            found.append(InputError(f"{prefix}.logit_cap", self.logit_cap, "a number > 0, or 0 for none"))
        if not found and RESIDUALS[self.residual] is not None:
            found += collect([lambda: HyperConnection(1, self.streams, self.manifold, device="meta")])
        return found

    def check(self) -> None:
        """Raise the first problem."""
        for problem in self.problems():
            raise problem

    @property
    def manifold(self) -> str:
        """Manifold of H_res."""
        return RESIDUALS[self.residual] or "identity"

    @property
    def sites(self) -> int:
        """Hyper-connection sites, whether or not they are in use."""
        return 2 * self.layers

    @property
    def hidden(self) -> int:
        """Hidden width of the SwiGLU."""
        return self.ffn_dim or 32 * -(-8 * self.dim // 96)


def rotary_table(context: int, head_dim: int, base: float, device=None) -> Tensor:
    """Cosines and sines of the rotary angles, [2, context, head_dim / 2], fp32 (Su et al., arXiv 2104.09864)."""
    frequency = base ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    angle = torch.arange(context, device=device, dtype=torch.float32)[:, None] * frequency
    return torch.stack([angle.cos(), angle.sin()])


def rotate(x_bhtd: Tensor, table: Tensor) -> Tensor:
    """Rotate the pairs (i, i + d/2) of each head by the position's angles."""
    cos, sin = table[:, : x_bhtd.shape[-2]].to(x_bhtd.dtype)
    a, b = x_bhtd.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class RMSNorm(nn.RMSNorm):
    """torch's RMSNorm, in the dtype of its input: fp32 weights over bf16 streams keep the fused kernel."""

    def forward(self, x: Tensor) -> Tensor:
        """[b, t, c] → [b, t, c]."""
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads, self.head_dim = config.heads, config.dim // config.heads
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x_btc: Tensor, rotary: Tensor) -> Tensor:
        """[b, t, c] → [b, t, c]."""
        return self.out(self.attend(self.qkv(x_btc), rotary))

    def attend(self, qkv_bte: Tensor, rotary: Tensor) -> Tensor:
        """The part without weights, over as many heads as it is given: [b, t, 3·h·d] → [b, t, h·d]."""
        b, t, _ = qkv_bte.shape
        q, k, v = qkv_bte.view(b, t, 3, -1, self.head_dim).permute(2, 0, 3, 1, 4)
        y_bhtd = F.scaled_dot_product_attention(rotate(q, rotary), rotate(k, rotary), v, is_causal=True)
        return y_bhtd.transpose(1, 2).flatten(2)


class SwiGLU(nn.Module):
    """out(silu(gate(x)) · up(x)) (Shazeer, arXiv 2002.05202)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.dim, 2 * config.hidden, bias=False)
        self.out = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x_btc: Tensor) -> Tensor:
        """[b, t, c] → [b, t, c]."""
        gate, up = self.gate_up(x_btc).chunk(2, dim=-1)
        return self.out(F.silu(gate) * up)


class Block(nn.Module):
    """Two sites: attention and SwiGLU, each behind its own RMSNorm."""

    def __init__(self, config: GPTConfig, index: int) -> None:
        super().__init__()
        self.norm_attention = RMSNorm(config.dim, eps=config.norm_eps)
        self.norm_ffn = RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn = SwiGLU(config)
        self.site_attention = _site(config, 2 * index)
        self.site_ffn = _site(config, 2 * index + 1)

    def forward(self, x: Tensor | None, rotary: Tensor, chain: StreamChain | None = None) -> Tensor:
        """Streams [b, t, n, c] → the same shape.

        With a chain, which holds the streams: the last sub-layer's output [b, t, c] of the block before (None for the first
        block) → that of this block.
        """
        if chain is None:
            h_btc, merge = self.site_attention(x)
            h_btc, merge = merge.into(self.site_ffn, self.attention(self.norm_attention(h_btc), rotary))
            return merge(self.ffn(self.norm_ffn(h_btc)))
        if x is not None:
            chain.leave(x)
        h_btc = chain.enter(self.site_attention)
        chain.leave(self.attention(self.norm_attention(h_btc), rotary))
        return self.ffn(self.norm_ffn(chain.enter(self.site_ffn)))


def _site(config: GPTConfig, index: int) -> HyperConnection:
    return HyperConnection(
        config.dim,
        1 if config.residual == "residual" else config.streams,
        config.manifold,
        site=index,
        iterations=config.sinkhorn_iterations,
        cap=config.logit_cap or None,
        norm_eps=config.norm_eps,
    )


class GPT(nn.Module):
    """Tokens [b, t] → logits [b, t, v].

    Raises:
        InputError: a field of the configuration is out of range, or a batch is longer than ``context``.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        config.check()
        self.config = config
        self.streams = 1 if config.residual == "residual" else config.streams
        # HC (arXiv 2409.19606) repeats the embedding and sums at the end; the manifolds use the start of docs/start.md.
        self.spread = 0.0 if config.manifold == "none" else expand_spread(self.streams)
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config, index) for index in range(config.layers))
        self.readout = StreamReadout(config.dim, self.streams, "sum" if config.manifold == "none" else "learned")
        self.norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer(
            "rotary", rotary_table(config.context, config.dim // config.heads, config.rope_base), persistent=False
        )
        self.rotary: Tensor
        # Blocks hand the streams on in a chain. Only for blocks that run once and eagerly: activation checkpointing and
        # torch.compile take a block as a function of its arguments.
        self.chained, self.recompute = False, 0
        self._initialise()

    def _initialise(self) -> None:
        """Normal weights; what writes into the streams is scaled down by depth (GPT-2). Sites start themselves."""
        std = self.config.init_std
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding) and module is not self.head:
                nn.init.normal_(module.weight, std=std / (self.config.sites**0.5) if name.endswith(".out") else std)

    def forward(self, tokens_bt: Tensor) -> Tensor:
        """Logits of the next token at every position, [b, t, v]."""
        if tokens_bt.shape[-1] > self.config.context:
            raise InputError("tokens", tokens_bt.shape[-1], f"at most context = {self.config.context} tokens")
        x_btc = self.embedding(tokens_bt)
        if torch.is_autocast_enabled(x_btc.device.type):  # narrow streams, as the paper trains them; maps stay fp32
            x_btc = x_btc.to(torch.get_autocast_dtype(x_btc.device.type))
        x_btnc = expand_streams(x_btc, self.streams, spread=self.spread)
        x_btnc = self._chained(x_btnc) if self.chained else self._block_by_block(x_btnc)
        return self.head(self.norm(self.readout(x_btnc)))

    def _block_by_block(self, x_btnc: Tensor) -> Tensor:
        for block in self.blocks:
            x_btnc = block(x_btnc, self.rotary)
        return x_btnc

    def _chained(self, x_btnc: Tensor) -> Tensor:
        """The same numbers with one pass over the streams between any two sub-layers, across blocks too."""
        chain = StreamChain(x_btnc, self.recompute or None)
        f_btc = None
        for block in self.blocks:
            f_btc = block(f_btc, self.rotary, chain)
        if f_btc is not None:
            chain.leave(f_btc)
        return chain.streams()
