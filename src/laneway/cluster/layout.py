"""How one training job is laid over the devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Layout", "Precision", "Recompute"]

Recompute = Literal["none", "selective", "full"]
Precision = Literal["fp32", "bf16", "fp8"]


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism and the dials that go with them.

    Ranks run tp innermost, then cp, dp_shard, dp_replicate, and pp outermost. Expert parallelism reuses the
    dp_shard × cp ranks (ep divides their product).

    Attributes:
        tp, cp, dp_shard, dp_replicate, pp, ep: degrees.
        micro_batch: sequences of one micro-batch on one data-parallel rank.
        recompute: "none", "selective" (attention's inner part), "full" (whole blocks).
        precision: of matrix products.
        sequence_parallel: norms and dropout split over tp ranks (with tp > 1).
        chunks: model chunks per pipeline rank; 1 is plain 1F1B, more is interleaved.
        zero: what dp_shard splits: 1 optimizer state, 2 and gradients, 3 and parameters (FSDP).
        grad_bytes: bytes per gradient element on the wire.
        overlap_grads: gradient reduction overlaps the backward pass.
    """

    tp: int = 1
    cp: int = 1
    dp_shard: int = 1
    dp_replicate: int = 1
    pp: int = 1
    ep: int = 1
    micro_batch: int = 1
    recompute: Recompute = "none"
    precision: Precision = "bf16"
    sequence_parallel: bool = False
    chunks: int = 1
    zero: int = 3
    grad_bytes: int = 4
    overlap_grads: bool = True

    @property
    def dp(self) -> int:
        """Data-parallel ranks: shard times replicate."""
        return self.dp_shard * self.dp_replicate

    @property
    def world(self) -> int:
        """Devices the layout needs."""
        return self.tp * self.cp * self.dp * self.pp
