"""Numbers of the levels that one group's collective needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from laneway.cluster.costs.calibration import Calibration
from laneway.cluster.costs.placement import Group, Placement, place
from laneway.cluster.topology import Level, Topology
from laneway.core import InputError

__all__ = ["Lanes", "lanes_of"]


@dataclass(frozen=True)
class Lanes:
    """A group on its levels. By level: seconds a step, and bytes per second that each device has when all of them send.

    A level's links are shared by all devices inside its member, whichever group they are in: groups of one shape work at once.
    """

    at: Placement
    names: tuple[str, ...]
    latency: tuple[float, ...]
    per_device: tuple[float, ...]

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return self.at.size

    @property
    def crossed(self) -> tuple[int, ...]:
        """Levels the group crosses."""
        return self.at.crossed

    def rails(self, level: int) -> float:
        """Bytes per second of the group into one member of the level: all its ranks in there carry one ring each."""
        return self.per_device[level] * self.at.inside(level)

    def slowest_ring(self) -> float:
        """Bytes per second of a ring that crosses each border once: that of its slowest level."""
        return min(self.rails(level) for level in self.crossed)

    def slowest_flow(self) -> float:
        """Bytes per second of one device where every hop may cross the outermost level."""
        return min(self.per_device[level] for level in self.crossed)

    def slowest_step(self) -> float:
        """Seconds of the slowest hop."""
        return max(self.latency[level] for level in self.crossed)


def lanes_of(group: Group | Sequence[int] | int | None, topology: Topology, calibration: Calibration) -> Lanes:
    """The levels as a group meets them. Half-duplex links carry half as much each way.

    Raises:
        InputError: a level without bandwidth, or ranks that the topology lacks.
    """
    at = place(group, topology)
    return _lanes(at, topology.levels, calibration.network_efficiency)


@lru_cache(maxsize=16384)
def _lanes(at: Placement, levels: tuple[Level, ...], efficiency: float) -> Lanes:
    per_device, inside = [], 1
    for level in levels:
        if not level.link_bandwidth > 0:
            raise InputError(f"topology.{level.name}.link_bandwidth", level.link_bandwidth, "bytes per second above 0")
        rate = level.links * level.link_bandwidth / inside / level.oversubscription
        per_device.append(rate * efficiency * (1.0 if level.duplex else 0.5))
        inside *= level.size
    return Lanes(at, tuple(level.name for level in levels), tuple(level.latency_s for level in levels), tuple(per_device))
