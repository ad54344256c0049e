"""A topology in words: totals, and each level's network with its numbers."""

from __future__ import annotations

from laneway.cluster.topology import Topology

__all__ = ["describe"]

GIGA = 1e9


def describe(topology: Topology) -> str:
    """All levels with their totals, networks and numbers, one a line; see `Topology.describe`."""
    device = topology.device
    flops = ", ".join(f"{precision} {value / 1e12:g}" for precision, value in device.flops.items())
    lines = [
        f"{topology}: {topology.world} devices",
        f"device: {device.name}, {device.memory_bytes / GIGA:g} GB at {device.memory_bandwidth / GIGA:g} GB/s, "
        f"{device.watts:g} W; peak TFLOP/s {flops}",
        *(_level(topology, index) for index in range(len(topology.levels))),
    ]
    if topology.hosts:
        shown = ", ".join(topology.hosts[:8])
        lines.append(f"hosts: {shown}" + (f" and {len(topology.hosts) - 8} more" if len(topology.hosts) > 8 else ""))
    return "\n".join(lines)


def _level(topology: Topology, index: int) -> str:
    level = topology.levels[index]
    counts = topology.member_counts(index)
    each = str(level.size) if level.counts is None else f"{min(counts)} to {max(counts)}"
    sizes = f"{each} {_word(topology, index)}"
    if len(counts) > 1:
        sizes += f" in each of {len(counts)} {_word(topology, index + 1)}, {sum(counts)} in all"
    parts = [
        f"{level.links} × {level.network} of {level.link_bandwidth / GIGA:.4g} GB/s a {level.member or 'member'}",
        f"{level.oversubscription:g}:1 oversubscribed" if level.oversubscription != 1 else "",
        f"{topology.bandwidth_per_device(index) / GIGA:.4g} GB/s for each device when all send",
        f"{level.latency_s * 1e6:.4g} µs a step",
        f"{level.joules_per_byte * 1e9:.3g} nJ a byte",
        "" if level.duplex else "one direction at a time",
        "" if level.trusted else "not trusted",
    ]
    return f"{level.name}: {sizes}; {', '.join(part for part in parts if part)}"


def _word(topology: Topology, index: int) -> str:
    if index < len(topology.levels) and topology.levels[index].member:
        return f"{topology.levels[index].member}s"
    return "devices" if index == 0 else f"groups of L{index}"
