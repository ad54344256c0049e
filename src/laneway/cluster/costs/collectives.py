"""Time of one collective on the levels of a topology, with an interval."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from laneway.cluster.costs import schemes
from laneway.cluster.costs.calibration import Calibration
from laneway.cluster.costs.constants import BASE_LATENCY, MULTICAST, POST
from laneway.cluster.costs.network import Lanes, lanes_of
from laneway.cluster.costs.placement import Group
from laneway.cluster.costs.schemes import Cost
from laneway.cluster.figure import Interval
from laneway.cluster.topology import Topology
from laneway.core import InputError, choice, positive_int

__all__ = ["ALGORITHMS", "OPS", "collective_bytes", "collective_cost", "collective_time"]

DEFAULT = Calibration()
Members = Group | Sequence[int] | int | None

REDUCING = ("all_reduce", "reduce_scatter", "all_gather")
OPS = (*REDUCING, "all_to_all", "broadcast", "p2p")
_RINGS: dict[str, Callable[[Lanes, float, int], Cost]] = {
    "ring": schemes.ring,
    "ring_worst": schemes.ring_worst,
    "tree": schemes.double_tree,
    "two_level": schemes.two_level,
    "hierarchy": schemes.hierarchy,
}
ALGORITHMS: dict[str, tuple[str, ...]] = {
    "all_reduce": (*_RINGS, "nvls_tree", "torus"),
    "reduce_scatter": ("ring", "ring_worst", "two_level", "hierarchy", "torus"),
    "all_gather": ("ring", "ring_worst", "two_level", "hierarchy", "torus"),
    "all_to_all": ("flat", "hierarchy"),
    "broadcast": ("chain",),
    "p2p": ("direct",),
}
"""Algorithms of each operation, the plainest first. `ring` is in topology order; `hierarchy` has the levels the group crosses."""


def collective_cost(
    op: str,
    nbytes: float,
    topology: Topology,
    *,
    algorithm: str,
    group: Members = None,
    dims: tuple[int, ...] | None = None,
    calibration: Calibration | None = None,
) -> tuple[Cost, Lanes]:
    """What `collective_time` adds up: seconds of steps and bytes by level, and the levels as the group meets them."""
    choice("op", op, OPS)
    choice("algorithm", algorithm, ALGORITHMS[op])
    if isinstance(nbytes, bool) or not isinstance(nbytes, int | float) or not 0 <= nbytes < float("inf"):
        raise InputError("nbytes", nbytes, "bytes ≥ 0")
    lanes = lanes_of(group, topology, calibration or DEFAULT)
    if not lanes.crossed:
        return Cost(), lanes
    legs = 2 if op == "all_reduce" else 1
    if algorithm in _RINGS and op in REDUCING:
        return _RINGS[algorithm](lanes, nbytes, legs), lanes
    if algorithm == "torus":
        return schemes.torus(lanes, nbytes, _dims(dims, lanes), legs), lanes
    if algorithm == "nvls_tree":
        _check_multicast(topology, lanes)
        return schemes.nvls_tree(lanes, nbytes), lanes
    if op == "all_to_all":
        exchange = schemes.exchange if algorithm == "flat" else schemes.exchange_by_level
        return exchange(lanes, nbytes, POST.value), lanes
    return (schemes.chain if op == "broadcast" else schemes.message)(lanes, nbytes), lanes


def collective_time(
    op: str,
    nbytes: float,
    topology: Topology,
    *,
    algorithm: str,
    group: Members = None,
    chunks: int = 1,
    dims: tuple[int, ...] | None = None,
    calibration: Calibration | None = None,
) -> Interval:
    """Seconds of one collective, all groups of its shape working at once.

    Args:
        op: one of `OPS`.
        nbytes: bytes of the whole vector on each rank: what is reduced, or what all ranks have after an all-gather; for
            all_to_all what a rank has for all ranks together; for p2p and broadcast the message.
        topology: devices and levels.
        algorithm: one of `ALGORITHMS[op]`.
        group: a `Group` (size and stride), a size, a list of ranks, or None for all devices.
        chunks: pieces the vector is cut into, which follow each other through the levels of a hierarchy.
        dims: sizes of a torus (x, y, z) of the nodes of a rack; by default the ones with the fewest steps.
        calibration: measured constants.

    Raises:
        InputError: an unknown operation, algorithm or rank, a torus that does not fit, a switch without multicast.
    """
    positive_int("chunks", chunks)
    calibration = calibration or DEFAULT
    cost, lanes = collective_cost(op, nbytes, topology, algorithm=algorithm, group=group, dims=dims, calibration=calibration)
    if not lanes.crossed:
        return Interval(0.0, 0.0, 0.0)
    seconds = cost.seconds(chunks) + chunks * BASE_LATENCY.value
    return Interval(seconds, seconds / (1 + calibration.network_spread / 2), seconds * (1 + calibration.network_spread))


def collective_bytes(
    op: str,
    nbytes: float,
    topology: Topology,
    *,
    algorithm: str,
    group: Members = None,
    dims: tuple[int, ...] | None = None,
) -> dict[str, float]:
    """Bytes that leave one device over each level, by level name: for a node's, times its devices."""
    cost, lanes = collective_cost(op, nbytes, topology, algorithm=algorithm, group=group, dims=dims)
    return {lanes.names[level]: found for level, found in cost.nbytes.items()}


def _dims(dims: tuple[int, ...] | None, lanes: Lanes) -> tuple[int, ...]:
    members = lanes.at.fan(1) if len(lanes.names) > 1 else 1
    if dims is None:
        return schemes.torus_sizes(members)
    if not dims or any(size < 1 for size in dims) or not schemes.is_torus(dims, members):
        raise InputError("dims", dims, f"sizes that multiply to the {members} nodes of a rack in the group")
    return dims


def has_multicast(topology: Topology) -> bool:
    """Whether the devices' switch reduces and multicasts."""
    return topology.device.name.upper().startswith(MULTICAST)


def _check_multicast(topology: Topology, lanes: Lanes) -> None:
    if not has_multicast(topology):
        raise InputError("algorithm", "nvls_tree", "a device whose switch multicasts: " + ", ".join(MULTICAST))
    if lanes.at.fan(0) == 1:
        raise InputError("algorithm", "nvls_tree", "a group with more than one device in a node")
