"""The shape of a transformer, as far as a plan needs it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Architecture"]


@dataclass(frozen=True)
class Architecture:
    """A decoder-only transformer.

    Attributes:
        layers, hidden, heads, kv_heads, ffn, vocab: the usual sizes; ffn is the feed-forward width (of one expert).
        gated: three feed-forward matrices (SwiGLU) instead of two.
        tied: read-out shares the embedding's weights.
        experts: experts of one feed-forward layer, 0 for dense; experts_per_token are active.
        streams: residual streams of a hyper-connection; 1 is the plain residual.
        scheduler: dimensions of the features of a scheduler of the streams; 0 is none.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    gated: bool = False
    tied: bool = True
    experts: int = 0
    experts_per_token: int = 0
    streams: int = 1
    scheduler: int = 0
