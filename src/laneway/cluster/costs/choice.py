"""Which collective: the fastest by the model, with the native flat one kept wherever it wins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from laneway.cluster.costs.calibration import Calibration
from laneway.cluster.costs.collectives import ALGORITHMS, collective_time, has_multicast
from laneway.cluster.costs.network import lanes_of
from laneway.cluster.costs.placement import Group
from laneway.cluster.figure import Interval
from laneway.cluster.topology import Topology
from laneway.core import InputError, choice

__all__ = ["CollectiveChoice", "choose_collective", "native_time"]

NATIVE: dict[str, tuple[str, ...]] = {
    "all_reduce": ("nvls_tree", "tree", "ring"),
    "reduce_scatter": ("ring",),
    "all_gather": ("ring",),
    "all_to_all": ("flat",),
    "broadcast": ("chain",),
    "p2p": ("direct",),
}
"""What one call of NCCL itself picks from, on a group in topology order; gloo, on CPUs, has its ring alone."""
MARGIN = 0.05
"""A scheme of our own must beat the native one by this share: a switch of code path is not worth less."""
CHUNKS = (1, 4, 16)
DEFAULT = Calibration()
Members = Group | Sequence[int] | int | None


@dataclass(frozen=True)
class CollectiveChoice:
    """The chosen algorithm with its time, the native one's, and all that was compared (seconds by name)."""

    algorithm: str
    chunks: int
    native: bool
    seconds: Interval
    native_seconds: Interval
    compared: dict[str, float]


def available(op: str, topology: Topology, group: Members = None) -> tuple[str, ...]:
    """Algorithms that this group can run; never the badly ordered ring."""
    lanes = lanes_of(group, topology, DEFAULT)
    names = [name for name in ALGORITHMS[choice("op", op, ALGORITHMS)] if name != "ring_worst"]
    if topology.device.name.upper().startswith("CPU"):
        names = [name for name in names if name not in ("tree", "nvls_tree")]  # gloo has rings only
    if not has_multicast(topology) or lanes.at.fan(0) == 1:
        names = [name for name in names if name != "nvls_tree"]
    if len(lanes.crossed) < 2:
        names = [name for name in names if name not in ("two_level", "hierarchy")]
    if len(lanes.names) < 2 or lanes.at.fan(1) < 4:
        names = [name for name in names if name != "torus"]
    if op == "all_to_all" and len(lanes.crossed) >= 2:
        names.append("hierarchy")
    return tuple(names)


def native_time(
    op: str, nbytes: float, topology: Topology, *, group: Members = None, calibration: Calibration | None = None
) -> tuple[str, Interval]:
    """The fastest of NCCL's own flat algorithms, and its seconds."""
    names = [name for name in NATIVE[choice("op", op, NATIVE)] if name in available(op, topology, group)]
    times = {name: collective_time(op, nbytes, topology, algorithm=name, group=group, calibration=calibration) for name in names}
    best = min(times, key=lambda name: times[name].value)
    return best, times[best]


def choose_collective(
    op: str, nbytes: float, topology: Topology, *, group: Members = None, calibration: Calibration | None = None
) -> CollectiveChoice:
    """The algorithm for one message size: native and flat, unless another is faster by more than `MARGIN`.

    Raises:
        InputError: as `collective_time`.
    """
    native, native_seconds = native_time(op, nbytes, topology, group=group, calibration=calibration)
    best, chunks, seconds = native, 1, native_seconds
    compared = {native: native_seconds.value}
    for name in available(op, topology, group):
        if name in NATIVE[op]:
            continue
        times = [
            (collective_time(op, nbytes, topology, algorithm=name, group=group, chunks=c, calibration=calibration), c)
            for c in CHUNKS
        ]
        found, pieces = min(times, key=lambda pair: pair[0].value)
        compared[name] = found.value
        if found.value < min(seconds.value, native_seconds.value * (1 - MARGIN)):
            best, chunks, seconds = name, pieces, found
    return CollectiveChoice(best, chunks, best == native, seconds, native_seconds, compared)


def price(
    op: str,
    nbytes: float,
    topology: Topology,
    group: Group,
    algorithm: str,
    calibration: Calibration,
) -> tuple[str, Interval]:
    """Name and seconds under a policy: "auto" (`choose_collective`), "native", or one algorithm by name.

    An algorithm that this operation or group lacks (a tree reduces, but does not scatter) falls back to the native one.
    """
    if algorithm == "auto":
        chosen = choose_collective(op, nbytes, topology, group=group, calibration=calibration)
        return chosen.algorithm, chosen.seconds
    known = {name for names in ALGORITHMS.values() for name in names} | {"native"}
    if algorithm not in known:
        raise InputError("algorithm", algorithm, "one of auto, " + ", ".join(sorted(known)))
    if (algorithm == "ring_worst" and algorithm in ALGORITHMS[op]) or algorithm in available(op, topology, group):
        return algorithm, collective_time(op, nbytes, topology, algorithm=algorithm, group=group, calibration=calibration)
    return native_time(op, nbytes, topology, group=group, calibration=calibration)
