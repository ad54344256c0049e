"""Bytes on the fullest device: states by ZeRO stage, activations by recomputation (Korthikanti et al. 2022), streams, logits."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from laneway.cluster.architecture import Architecture
from laneway.cluster.costs.constants import CONTEXT
from laneway.cluster.costs.sizes import (
    SITES,
    attention_parameters,
    connection_parameters,
    embedding_parameters,
    feed_forward_parameters,
    head_size,
)
from laneway.cluster.estimate import MemoryEstimate
from laneway.cluster.layout import Layout

__all__ = ["activation_bytes_of_layer", "in_flight", "layers_of_stage", "memory_of", "parameters_on_device"]

STATE_BYTES = {"fp32": (4, 4, 8), "bf16": (2, 4, 12), "fp8": (4, 4, 12)}
"""Weight, accumulated gradient and Adam's states (fp32 copy included) of a parameter; fp8 keeps bf16 and two fp8 copies."""
BUCKET = 40e6
"""Elements of one bucket of gradients: Megatron-LM's default."""


def layers_of_stage(arch: Architecture, layout: Layout) -> int:
    """Layers of the fullest pipeline rank."""
    return ceil(arch.layers / (layout.pp * layout.chunks)) * layout.chunks


def in_flight(micro_batches: int, pp: int, chunks: int = 1) -> float:
    """Micro-batches whose activations the first rank holds, counted in whole shares of its layers.

    1F1B: one for each rank behind it. Interleaved: more by 1 + (p - 1)/(p·v) (Korthikanti et al. 2022, section 4.2.3).
    """
    held = pp if chunks == 1 or pp == 1 else pp * (1 + (pp - 1) / (pp * chunks))
    return min(float(micro_batches), held)


def parameters_on_device(arch: Architecture, layout: Layout) -> tuple[float, float, float]:
    """Parameters of one device before any sharding over data: dense ones of its layers, its experts', embedding or read-out."""
    layers = layers_of_stage(arch, layout)
    expert = feed_forward_parameters(arch) * max(1, arch.experts) / layout.tp
    dense = (attention_parameters(arch) + arch.experts * arch.hidden) / layout.tp + 13 * arch.hidden + connection_parameters(arch)
    ends = embedding_parameters(arch) / layout.tp
    if layout.pp > 1 and not arch.tied:
        ends /= 2
    if not arch.experts:
        return layers * (dense + expert), 0.0, ends
    return layers * dense, layers * expert / layout.ep, ends


def activation_bytes_of_layer(arch: Architecture, layout: Layout, seq_len: int, *, flash: bool) -> float:
    """Bytes one layer keeps of one micro-batch for the backward pass.

    Korthikanti et al. 2022, equations 1 to 6: s·b·h·(10 + 24/t + 5·a·s/(h·t)); the last term is attention's scores, which a
    fused attention does not store and selective recomputation throws away; full recomputation keeps the layer's input, 2·s·b·h.
    """
    tokens = layout.micro_batch * ceil(seq_len / layout.cp)
    narrow = layout.tp if layout.sequence_parallel else 1
    wide = 4 if layout.precision == "fp32" else 2
    streams = arch.streams * arch.hidden * wide
    if layout.recompute == "full":
        return tokens * streams / narrow
    kv = arch.kv_heads * head_size(arch)
    split = (2 * arch.hidden + 2 * kv) * wide  # query, context, key, value
    inputs = 3 if arch.gated else 2
    split += inputs * arch.ffn * wide * max(1, arch.experts_per_token)
    whole = arch.hidden * (4 * wide + 2)  # inputs of norms and of the two products, two dropout masks
    if arch.streams > 1:
        whole += SITES * streams
    scores = 0.0
    if layout.recompute == "none" and not flash:
        scores = (2 * wide + 1) * arch.heads * seq_len / layout.tp
    return tokens * (whole / narrow + split / layout.tp + scores)


def _logits(arch: Architecture, layout: Layout, seq_len: int) -> float:
    """Logits in the products' precision, in fp32, and their gradient: ten bytes each."""
    return 10.0 * layout.micro_batch * ceil(seq_len / layout.cp) * arch.vocab / layout.tp


def memory_of(
    arch: Architecture, layout: Layout, *, seq_len: int, micro_batches: int | None = None, flash: bool = True
) -> MemoryEstimate:
    """Bytes on the fullest device.

    Args:
        arch, layout: what is trained and how it is laid out.
        seq_len: tokens of a sequence.
        micro_batches: of a step; None: enough to fill the pipeline.
        flash: attention stores no scores.
    """
    dense, experts, ends = parameters_on_device(arch, layout)
    shard = layout.dp_shard * layout.cp
    held = dense + ends
    expert_shard = max(1.0, shard / layout.ep)
    weight, gradient, states = STATE_BYTES[layout.precision]
    if layout.grad_bytes < 4:
        gradient = layout.grad_bytes

    def spread(stage: int, nbytes: float) -> float:
        return nbytes * (held / shard + experts / expert_shard) if layout.zero >= stage else nbytes * (held + experts)

    return MemoryEstimate(
        parameters=spread(3, weight),
        gradients=spread(2, gradient),
        optimizer=spread(1, states),
        activations=_activations(arch, layout, seq_len, micro_batches, flash),
        buffers=_buffers(arch, layout, (dense + experts) / layers_of_stage(arch, layout) * weight),
    )


def _activations(arch: Architecture, layout: Layout, seq_len: int, micro_batches: int | None, flash: bool) -> float:
    layers = layers_of_stage(arch, layout)
    kept = activation_bytes_of_layer(arch, layout, seq_len, flash=flash)
    held = in_flight(micro_batches or layout.pp * layout.chunks, layout.pp, layout.chunks)
    working = 0.0
    if layout.recompute != "none":
        whole = replace(layout, recompute="none")
        working = max(0.0, activation_bytes_of_layer(arch, whole, seq_len, flash=flash) - kept)
    first = layers * kept * held + working
    last = layers * kept * (1 if layout.pp > 1 else held) + _logits(arch, layout, seq_len)
    return max(first, last)


def _buffers(arch: Architecture, layout: Layout, layer_bytes: float) -> float:
    """Context, buckets of gradients, and with ZeRO-3 two gathered layers."""
    gathered = 2 * layer_bytes if layout.zero >= 3 and layout.dp_shard > 1 else 0.0
    buckets = 2 * 4 * BUCKET if layout.dp > 1 else 0.0
    return CONTEXT.value + buckets + gathered
