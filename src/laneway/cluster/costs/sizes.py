"""Parameters and floating-point operations of an architecture."""

from __future__ import annotations

from laneway.cluster.architecture import Architecture

__all__ = ["attention_parameters", "connection_parameters", "feed_forward_parameters", "flops_per_token", "parameters_of"]

SITES = 2
"""Sites of a layer that a hyper-connection wraps: attention and feed-forward."""


def head_size(arch: Architecture) -> int:
    """Width of one head."""
    return arch.hidden // arch.heads


def attention_parameters(arch: Architecture) -> int:
    """Weights of one attention: query, key, value and output projections."""
    kv = arch.kv_heads * head_size(arch)
    return arch.hidden * (2 * arch.hidden + 2 * kv)


def feed_forward_parameters(arch: Architecture) -> int:
    """Weights of one feed-forward network (one expert)."""
    return (3 if arch.gated else 2) * arch.hidden * arch.ffn


def connection_parameters(arch: Architecture) -> int:
    """Weights of one layer's hyper-connections: each site projects n·C onto n² + 2n map entries; none for one stream.

    A scheduler of d features has n·d + d² + 2·d more at each site.
    """
    n, d = arch.streams, arch.scheduler
    return 0 if n == 1 else SITES * ((n * arch.hidden + 1) * n * (n + 2) + d * (n + d + 2))


def layer_parameters(arch: Architecture, *, active: bool = False) -> int:
    """Weights of one layer, of all experts or of the active ones; norms and biases (13·hidden) included."""
    copies = max(1, arch.experts_per_token if active else arch.experts)
    router = arch.experts * arch.hidden
    return (
        attention_parameters(arch)
        + copies * feed_forward_parameters(arch)
        + router
        + connection_parameters(arch)
        + 13 * arch.hidden
    )


def embedding_parameters(arch: Architecture) -> int:
    """Weights of the embedding, and of the read-out where it has its own."""
    return (1 if arch.tied else 2) * arch.vocab * arch.hidden


def parameters_of(arch: Architecture) -> int:
    """Parameters of the whole model, all experts counted."""
    return arch.layers * layer_parameters(arch) + embedding_parameters(arch)


def flops_per_token(arch: Architecture, seq_len: int) -> float:
    """Model FLOPs of one token, forward and backward, nothing recomputed: what MFU counts.

    6 per weight that a token meets, and 12·hidden·seq_len a layer for attention's two products, causality not exploited
    (Narayanan et al. 2021, equation 3, with recomputation taken out).
    """
    weights = arch.layers * (
        attention_parameters(arch)
        + max(1, arch.experts_per_token) * feed_forward_parameters(arch)
        + arch.experts * arch.hidden
        + connection_parameters(arch)
    )
    return 6.0 * (weights + arch.vocab * arch.hidden) + 12.0 * arch.layers * arch.hidden * seq_len
