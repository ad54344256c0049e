"""Which devices there are and how they are joined: a device, and levels from the innermost outwards.

L1 joins the devices of a node, L2 the nodes of a rack, L3 racks; further levels (sites, clouds, edge members) are allowed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from laneway.core import InputError, positive_int

__all__ = ["Device", "Level", "Topology"]

MOST_LINKS = 10**9


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
        size: members of one group of this level; of the largest where they differ.
        latency_s: seconds of one step between two members (α).
        link_bandwidth: bytes per second and direction of one link of a member, as collectives reach it.
        links: links of one member, shared by all devices in it.
        oversubscription: ≥ 1; the group's fabric carries its members' links divided by it.
        duplex: whether a link sends and receives at full speed at once.
        trusted: False for members outside one's own walls.
        joules_per_byte: energy of one byte over this level.
        network: catalogue name, "NDR400", or "custom".
        source: where latency and bandwidth come from.
        counts: members of each group where they differ (ragged), else None.
        member: what a member is called: "device", "node", "rack", "site"; empty where nobody said.

    Raises:
        InputError: a size, count or number of links below 1, a bandwidth that is not above 0, an oversubscription below 1.
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
    member: str = ""

    def __post_init__(self) -> None:
        positive_int(f"{self.name}.size", self.size)
        if positive_int(f"{self.name}.links", self.links) > MOST_LINKS:
            raise InputError(f"{self.name}.links", self.links, f"an integer from 1 to {MOST_LINKS}")
        for name, least, accepted in (
            ("link_bandwidth", math.ulp(0), "bytes per second, more than 0"),
            ("latency_s", 0, "seconds, 0 or more"),
            ("oversubscription", 1, "a number ≥ 1"),
            ("joules_per_byte", 0, "joules, 0 or more"),
        ):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value < math.inf:
                raise InputError(f"{self.name}.{name}", value, accepted)
        for count in self.counts or ():
            positive_int(f"{self.name}.counts", count)
        if self.counts is not None and max(self.counts, default=0) != self.size:
            raise InputError(f"{self.name}.counts", self.counts, f"counts of which the largest is the size, {self.size}")


@dataclass(frozen=True)
class Topology:
    """A device type and the levels that join its copies, innermost first.

    ``Topology.parse("8xH100_16nodes_4racks@NDR400/400GbE:4")`` is the usual way to make one; ``describe()`` says in full what
    that means.

    Raises:
        InputError: no level, or two of the same name; counts of a level, or hosts, that are not as many as there are groups.
    """

    device: Device
    levels: tuple[Level, ...]
    hosts: tuple[str, ...] = ()
    """Names of the hosts (one for each group of the innermost level) in the order in which ranks run over them, where known."""

    def __post_init__(self) -> None:
        if not self.levels:
            raise InputError("levels", self.levels, "at least one level")
        names = [level.name for level in self.levels]
        if len(set(names)) < len(names):
            raise InputError("levels", names, "a name of its own for each level")
        for index, level in enumerate(self.levels):
            if level.counts is not None and len(level.counts) != self._groups_of(index):
                accepted = f"one count for each of the {self._groups_of(index)} groups"
                raise InputError(f"{level.name}.counts", level.counts, accepted)
        if self.hosts and (len(self.hosts) != self._groups_of(0) or len(set(self.hosts)) != len(self.hosts)):
            raise InputError("hosts", self.hosts, f"{self._groups_of(0)} different names, one for each group of L1")

    @staticmethod
    def parse(given: str | Mapping[str, Any] | Path | Topology) -> Topology:
        """A topology from its short form, from a table, or from a TOML or JSON file (a path, or a name with that ending).

        Raises:
            InputError: it says none; the message shows what is accepted and where it went wrong.
        """
        from laneway.cluster.grammar import parse_topology
        from laneway.cluster.topology_files import is_file_name, read_topology, topology_from_dict

        if isinstance(given, Topology):
            return given
        if isinstance(given, Mapping):
            return topology_from_dict(given)
        if isinstance(given, Path) or is_file_name(given):
            return read_topology(given)
        return parse_topology(given)

    @property
    def world(self) -> int:
        """Number of devices."""
        return self.members(0)

    def members(self, level: int) -> int:
        """Members of all groups of `levels[level]` together: devices, nodes, racks, …"""
        return sum(self.member_counts(level)) if self._ragged(level) else self.levels[level].size * self._groups_of(level)

    def member_counts(self, level: int) -> tuple[int, ...]:
        """Members of each group of `levels[level]`."""
        this = self.levels[level]
        return this.counts if this.counts is not None else (this.size,) * self._groups_of(level)

    def _ragged(self, level: int) -> bool:
        return self.levels[level].counts is not None

    def _groups_of(self, level: int) -> int:
        return self.members(level + 1) if level + 1 < len(self.levels) else 1

    def groups(self, level: int) -> tuple[tuple[int, ...], ...]:
        """Ranks of each group of `levels[level]`, where ranks run in the topology's own order."""
        bounds = [0, *accumulate(self.member_counts(0))]
        for outer in range(1, level + 1):
            ends = [0, *accumulate(self.member_counts(outer))]
            bounds = [bounds[end] for end in ends]
        return tuple(tuple(range(first, last)) for first, last in pairwise(bounds))

    def devices_in(self, level: int) -> int:
        """Devices of one full group of `levels[level]`."""
        return math.prod(each.size for each in self.levels[: level + 1])

    def bandwidth_per_device(self, level: int) -> float:
        """Bytes per second and direction that each device has over `levels[level]` when all of them send at once."""
        this = self.levels[level]
        inside = self.devices_in(level - 1) if level else 1
        return this.links * this.link_bandwidth / inside / this.oversubscription

    def describe(self) -> str:
        """All levels with their totals, networks and numbers, one a line."""
        from laneway.cluster.describe import describe

        return describe(self)

    def __str__(self) -> str:
        """The short form; networks that have none are written `custom`."""
        from laneway.cluster.short_form import short_form

        return short_form(self)
