"""The cost model: seconds, bytes and energy of one training step laid over a topology. No torch.

``sizes`` (parameters, FLOPs) · ``matmul``, ``layers`` (compute) · ``memory`` · ``placement``, ``network``, ``schemes``,
``collectives``, ``choice`` (one collective) · ``traffic``, ``data``, ``pipeline`` (a layout's) · ``step`` (all of it) ·
``calibration``, ``constants``.
"""

from __future__ import annotations

from laneway.cluster.costs.calibration import SOURCES, Calibration
from laneway.cluster.costs.choice import CollectiveChoice, choose_collective, native_time
from laneway.cluster.costs.collectives import ALGORITHMS, OPS, collective_bytes, collective_time
from laneway.cluster.costs.memory import memory_of
from laneway.cluster.costs.placement import Group, Placement, place
from laneway.cluster.costs.sizes import flops_per_token, parameters_of
from laneway.cluster.costs.step import estimate_step, micro_batches_of

__all__ = [
    "ALGORITHMS",
    "OPS",
    "SOURCES",
    "Calibration",
    "CollectiveChoice",
    "Group",
    "Placement",
    "choose_collective",
    "collective_bytes",
    "collective_time",
    "estimate_step",
    "flops_per_token",
    "memory_of",
    "micro_batches_of",
    "native_time",
    "parameters_of",
    "place",
]
