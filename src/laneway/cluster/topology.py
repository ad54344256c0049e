"""Which devices there are and how they are joined: a device, and levels from the innermost outwards.

L1 joins the devices of a node, L2 the nodes of a rack, L3 racks; further levels (sites, clouds, edge members) are allowed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Device", "Level", "Topology"]


@dataclass(frozen=True)
class Device:
    """One accelerator (or CPU socket).

    Attributes:
        name: catalogue name, "H100".
        flops: peak dense FLOP/s by precision: keys "fp32", "tf32", "bf16", "fp8".
        memory_bytes: memory of one device.
        memory_bandwidth: bytes per second, reading and writing together.
        watts: board power at full load.
        source: where the numbers are published.
    """

    name: str
    flops: dict[str, float]
    memory_bytes: float
    memory_bandwidth: float
    watts: float
    source: str


@dataclass(frozen=True)
class Level:
    """One ring of the network. Its *members* are the groups of the level inside it (devices for the innermost).

    Attributes:
        name: "L1", "L2", …
        size: members of one group of this level.
        latency_s: seconds of one step between two members (α).
        link_bandwidth: bytes per second and direction of one link of a member.
        links: links of one member, shared by all devices in it.
        oversubscription: ≥ 1; the group's fabric carries its members' links divided by it.
        duplex: whether a link sends and receives at full speed at once.
        trusted: False for members outside one's own walls.
        joules_per_byte: energy of one byte over this level.
        network: catalogue name, "NDR400", or "custom".
        source: where latency and bandwidth come from.
        counts: members of each group where they differ (ragged), else None.
    """

    name: str
    size: int
    latency_s: float
    link_bandwidth: float
    links: int = 1
    oversubscription: float = 1.0
    duplex: bool = True
    trusted: bool = True
    joules_per_byte: float = 0.0
    network: str = "custom"
    source: str = ""
    counts: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Topology:
    """A device type and the levels that join its copies, innermost first."""

    device: Device
    levels: tuple[Level, ...]
    hosts: tuple[str, ...] = ()
    """Host names in rank order, where they are known."""

    @property
    def world(self) -> int:
        """Number of devices."""
        innermost = self.levels[0]
        if innermost.counts is not None:
            return sum(innermost.counts)
        return math.prod(level.size for level in self.levels)

    def devices_in(self, level: int) -> int:
        """Devices of one full group of `levels[level]`."""
        return math.prod(each.size for each in self.levels[: level + 1])

    def bandwidth_per_device(self, level: int) -> float:
        """Bytes per second and direction that each device has over `levels[level]` when all of them send at once."""
        this = self.levels[level]
        inside = self.devices_in(level - 1) if level else 1
        return this.links * this.link_bandwidth / inside / this.oversubscription
