"""Rows for NCCL's example tuner plugin: which algorithm and protocol for which size, for the groups of each level. No torch here.

Times are those of NCCL's own model (src/graph/tuning.cc: latencies of algorithms and protocols, share of the bandwidth that a
protocol reaches) with the rates of the topology. LL128 needs stores of a whole line to arrive at once: it stays inside a host.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from laneway.cluster.topology import Topology

__all__ = ["TUNER_HEADER", "TunerRow", "tuner_rows"]

TUNER_HEADER = "collective_type,min_bytes,max_bytes,algorithm,protocol,channels,nNodes,nRanks,numPipeOps,regBuff"
MOST = 2**32 - 1
ALGORITHMS, PROTOCOLS = ("tree", "ring"), ("ll", "ll128", "simple")
COLLECTIVES = {"allreduce": ALGORITHMS, "reducescatter": ("ring",), "allgather": ("ring",)}
BASE_US = {"tree": (6.8, 14.0, 8.4), "ring": (6.6, 14.0, 8.4)}
INSIDE_US = {"tree": (0.6, 1.25, 4.0), "ring": (0.6, 1.9, 3.4)}
OUTSIDE_US = {"tree": (5.0, 8.5, 14.0), "ring": (2.7, 4.0, 14.0)}
SHARE = (0.5, 0.92, 1.0)


@dataclass(frozen=True)
class TunerRow:
    """One line of the table.

    Attributes:
        collective: allreduce, reducescatter or allgather.
        least, most: bytes for which it holds.
        algorithm, protocol: to take.
        nodes, ranks: of the communicator for which it holds.
    """

    collective: str
    least: int
    most: int
    algorithm: str
    protocol: str
    nodes: int
    ranks: int

    def line(self) -> str:
        """Comma-separated; channels, pipelined operations and buffers as NCCL sees fit."""
        return f"{self.collective},{self.least},{self.most},{self.algorithm},{self.protocol},-1,{self.nodes},{self.ranks},-1,-1"


def tuner_rows(topology: Topology) -> Iterator[TunerRow]:
    """Rows of the whole's and each level's groups: inside a host, across hosts with one rank of each, and all ranks."""
    for collective, algorithms in COLLECTIVES.items():
        for nodes, ranks, bandwidth in _groups(topology):
            best = [(size, _best(size, nodes, ranks, bandwidth, algorithms)) for size in (2**power for power in range(10, 32))]
            yield from _merged(collective, best, nodes, ranks)


def _groups(topology: Topology) -> list[tuple[int, int, float]]:
    """(hosts, ranks, bytes per second of a rank's way) of communicators that runs make: each once."""
    inner, found = topology.levels[0], {}
    rate = inner.link_bandwidth * inner.links
    if inner.size > 1:
        found[1, inner.size] = rate
    hosts = 1
    for level in topology.levels[1:]:
        if level.size > 1:
            per_host = level.link_bandwidth * level.links / level.oversubscription / hosts
            found.setdefault((level.size, level.size), per_host / inner.size)
            hosts *= level.size
            rate = min(rate, per_host)
            found.setdefault((hosts, hosts * inner.size), rate)
    return [(*key, rate) for key, rate in found.items()]


def _best(size: int, nodes: int, ranks: int, bandwidth: float, algorithms: Sequence[str]) -> tuple[str, str]:
    return min(
        ((algorithm, protocol) for algorithm in algorithms for protocol in PROTOCOLS if nodes == 1 or protocol != "ll128"),
        key=lambda choice: _seconds(size, nodes, ranks, bandwidth, *choice, twice=len(algorithms) > 1),
    )


def _seconds(size: int, nodes: int, ranks: int, bandwidth: float, algorithm: str, protocol: str, *, twice: bool) -> float:
    """Start-up and bytes; ``twice``: an all-reduce passes the ring twice."""
    at, rounds = PROTOCOLS.index(protocol), 2 if twice else 1
    inside, outside = INSIDE_US[algorithm][at], OUTSIDE_US[algorithm][at]
    if algorithm == "ring":
        start = rounds * ((ranks - nodes) * inside + (nodes - 1 if nodes > 1 else 0) * outside)
        moved = rounds * (ranks - 1) / ranks
    else:
        start = 2 * ((ranks / nodes - 1) * inside + math.log2(nodes) * outside)
        moved = 2.0
    return (BASE_US[algorithm][at] + start) * 1e-6 + moved * size / (bandwidth * SHARE[at])


def _merged(collective: str, best: Sequence[tuple[int, tuple[str, str]]], nodes: int, ranks: int) -> Iterator[TunerRow]:
    """Sizes of one choice in one row; a row holds up to the next choice's first size."""
    least, choice = 0, best[0][1]
    for size, other in best[1:]:
        if other != choice:
            yield TunerRow(collective, least, size - 1, *choice, nodes, ranks)
            least, choice = size, other
    yield TunerRow(collective, least, MOST, *choice, nodes, ranks)
