"""Clusters that the planner's tests plan for."""

from __future__ import annotations

from dataclasses import replace

from laneway.cluster.architecture import Architecture
from laneway.cluster.topology import Topology

SMALL = Architecture(layers=8, hidden=512, heads=8, kv_heads=8, ffn=2048, vocab=8192)


def h100(nodes: int, memory_bytes: float | None = None) -> Topology:
    """Nodes of eight H100, with another memory size where one is asked for."""
    topology = Topology.parse(f"8xH100_{nodes}nodes")
    if memory_bytes is None:
        return topology
    return replace(topology, device=replace(topology.device, memory_bytes=memory_bytes))
