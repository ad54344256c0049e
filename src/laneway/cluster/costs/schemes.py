"""Time and bytes of each scheme for a reduction or a gather, from latencies and bandwidths of the levels it crosses.

S bytes, N ranks, n_l members of level l that the group crosses (N = Π n_l), α_l and B_l a level's step and its bytes per second
and device. `legs` is 2 for an all-reduce (reduce-scatter, then all-gather) and 1 for either half. The forms are those of Thakur,
Rabenseifner and Gropp 2005; of Sanders, Speck and Träff 2009 for the double tree; constants of NVLS are NCCL's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil, log2, prod

from laneway.cluster.costs.constants import NVLS_LATENCY, NVLS_SHARE, NVLS_TREE_SHARE
from laneway.cluster.costs.network import Lanes

__all__ = ["Cost", "double_tree", "hierarchy", "nvls_tree", "ring", "ring_worst", "torus", "torus_sizes", "two_level"]


@dataclass(frozen=True)
class Cost:
    """Seconds of steps and of bytes by level, and bytes that leave one device over each level; keys are level indices.

    `together`: all levels carry the message at once (a ring), so that the slowest counts; else one after the other (a hierarchy).
    """

    latency: dict[int, float] = field(default_factory=dict)
    transfer: dict[int, float] = field(default_factory=dict)
    nbytes: dict[int, float] = field(default_factory=dict)
    together: bool = False

    def seconds(self, chunks: int = 1) -> float:
        """Time of the message cut into `chunks` that follow each other: each is on another level."""
        steps = sum(self.latency.values())
        if self.together:
            return steps + max(self.transfer.values(), default=0.0)
        stages = [self.latency.get(level, 0.0) + seconds / chunks for level, seconds in self.transfer.items()]
        return sum(stages) + (chunks - 1) * max(stages, default=0.0)


def ring(lanes: Lanes, size: float, legs: int = 2) -> Cost:
    """One ring a rail in topology order: it enters and leaves every member of a level once. Bandwidth of the slowest level."""
    n = lanes.size
    hops = {level: _crossings(lanes, level) for level in lanes.crossed}
    latency = {level: legs * count * lanes.latency[level] for level, count in hops.items()}
    inner = min(lanes.crossed)
    latency[inner] = max(0.0, latency[inner] - legs * lanes.latency[inner])  # a ring of N has N - 1 steps
    moved = legs * (n - 1) / n * size
    transfer = {level: moved / lanes.rails(level) for level in hops}
    return Cost(latency, transfer, {level: moved / lanes.at.inside(level) for level in hops}, together=True)


def _crossings(lanes: Lanes, level: int) -> int:
    """Edges of an ordered ring that cross exactly this level: the outermost one also closes it."""
    last = level == max(lanes.crossed)
    return lanes.at.units_below(level) - (0 if last else lanes.at.units[level])


def ring_worst(lanes: Lanes, size: float, legs: int = 2) -> Cost:
    """A ring in the worst order: every hop crosses the slowest level, and all devices of a node share its links."""
    n = lanes.size
    level = min(lanes.crossed, key=lambda each: lanes.per_device[each])
    outer = max(lanes.crossed)
    moved = legs * (n - 1) / n * size
    latency = {level: legs * (n - 1) * lanes.slowest_step()}
    return Cost(latency, {level: moved / lanes.slowest_flow()}, {outer: moved}, together=True)


def double_tree(lanes: Lanes, size: float, legs: int = 2) -> Cost:
    """Two trees over the nodes, each for half of the message, chains inside a node."""
    inner = min(lanes.crossed)
    latency = {level: legs * _depth(lanes.at.fan(level)) * lanes.latency[level] for level in lanes.crossed if level != 0}
    if inner == 0:
        latency[0] = legs * (lanes.at.fan(0) - 1) * lanes.latency[0]
    moved = float(legs * size)
    transfer = {level: moved / lanes.rails(level) for level in lanes.crossed}
    return Cost(latency, transfer, {level: moved / lanes.at.inside(level) for level in lanes.crossed}, together=True)


def _depth(members: int) -> int:
    return ceil(log2(members)) if members > 1 else 0


def nvls_tree(lanes: Lanes, size: float) -> Cost:
    """All-reduce by a switch that reduces and multicasts in each node, and a tree over the nodes."""
    outside = [level for level in lanes.crossed if level > 0]
    nodes = lanes.at.units[0]
    latency = {0: NVLS_LATENCY.value} | {level: 2 * log2(lanes.at.fan(level)) * lanes.latency[level] for level in outside}
    transfer = {0: size / (NVLS_SHARE.value * lanes.per_device[0])}
    legs = 1 if nodes == 2 else 2  # a tree of two nodes is a chain: the root only receives, then only sends
    transfer |= {level: legs * size / (NVLS_TREE_SHARE.value * lanes.rails(level)) for level in outside}
    nbytes = {0: float(size)} | {level: 2 * size / lanes.at.inside(level) for level in outside}
    return Cost(latency, transfer, nbytes, together=True)


def hierarchy(lanes: Lanes, size: float, legs: int = 2) -> Cost:
    """Reduce-scatter level by level outwards, all-reduce on the outermost, gathers back: 2-level, 3-level and more."""
    cost, left = Cost(), float(size)
    for level in lanes.crossed:
        fan = lanes.at.fan(level)
        moved = legs * (fan - 1) / fan * left
        cost.latency[level] = legs * (fan - 1) * lanes.latency[level]
        cost.transfer[level] = moved / lanes.per_device[level]
        cost.nbytes[level] = moved
        left /= fan
    return cost


def two_level(lanes: Lanes, size: float, legs: int = 2) -> Cost:
    """Reduce-scatter in the innermost crossed level, one ring over all that is outside it for each of its ranks, gather."""
    inner, *outside = lanes.crossed
    fan, around = lanes.at.fan(inner), lanes.at.units[inner]
    first = legs * (fan - 1) / fan * size
    cost = Cost({inner: legs * (fan - 1) * lanes.latency[inner]}, {inner: first / lanes.per_device[inner]}, {inner: first})
    if outside:
        moved = legs * (around - 1) / around * size / fan
        cost.latency[outside[-1]] = legs * (around - 1) * max(lanes.latency[level] for level in outside)
        cost.transfer[outside[-1]] = moved / min(lanes.per_device[level] for level in outside)
        cost.nbytes.update(dict.fromkeys(outside, moved))
    return cost


def torus(lanes: Lanes, size: float, dims: tuple[int, ...], legs: int = 2) -> Cost:
    """A hierarchy whose level of nodes is a torus of `dims`: rings along each dimension in turn, over the node's same links.

    It saves steps, not bytes: a device has one network interface whatever the dimension.
    """
    cost, left = Cost(), float(size)
    for level in lanes.crossed:
        sizes = dims if level == 1 else (lanes.at.fan(level),)
        moved = 0.0
        for fan in sizes:
            moved += legs * (fan - 1) / fan * left
            left /= fan
        cost.latency[level] = legs * sum(fan - 1 for fan in sizes) * lanes.latency[level]
        cost.transfer[level] = moved / lanes.per_device[level]
        cost.nbytes[level] = moved
    return cost


def torus_sizes(members: int, dimensions: int = 3) -> tuple[int, ...]:
    """The factors of `members`, at most `dimensions` of them, with the fewest steps Σ (d − 1), largest first."""
    if dimensions == 1 or members == 1:
        return (members,)
    factors = [d for d in range(1, members + 1) if members % d == 0]
    options = [(d, *(rest for rest in torus_sizes(members // d, dimensions - 1) if rest > 1)) for d in factors]
    best = min(options, key=lambda sizes: (sum(size - 1 for size in sizes), sizes))
    return tuple(sorted((size for size in best if size > 1), reverse=True)) or (1,)


def exchange(lanes: Lanes, size: float, post_s: float) -> Cost:
    """All-to-all, each rank straight to every other: bytes for ranks outside a unit cross its level."""
    n, cost = lanes.size, Cost(together=True)
    inside_previous = 1
    for level in lanes.crossed:
        inside = max(1, n // lanes.at.units[level])
        beyond = (n - inside_previous) / n * size
        cost.transfer[level] = beyond / lanes.per_device[level]
        cost.nbytes[level] = beyond
        cost.latency[level] = (inside - inside_previous) * post_s
        inside_previous = inside
    cost.latency[max(lanes.crossed)] += lanes.slowest_step()
    return cost


def exchange_by_level(lanes: Lanes, size: float, post_s: float) -> Cost:
    """All-to-all level by level, innermost first: each level's members exchange what goes to their peers' places outside."""
    cost = Cost()
    for level in lanes.crossed:
        fan = lanes.at.fan(level)
        moved = (fan - 1) / fan * size
        cost.latency[level] = lanes.latency[level] + (fan - 1) * post_s
        cost.transfer[level] = moved / lanes.per_device[level]
        cost.nbytes[level] = moved
    return cost


def chain(lanes: Lanes, size: float) -> Cost:
    """Broadcast along an ordered chain, in chunks small enough that its length costs latency alone."""
    hops = {level: lanes.at.units_below(level) - lanes.at.units[level] for level in lanes.crossed}
    latency = {level: count * lanes.latency[level] for level, count in hops.items()}
    transfer = {level: size / lanes.rails(level) for level in hops}
    return Cost(latency, transfer, {level: size / lanes.at.inside(level) for level in hops}, together=True)


def message(lanes: Lanes, size: float) -> Cost:
    """One message to the next rank of the group over the outermost level between them."""
    level = max(lanes.crossed)
    return Cost({level: lanes.latency[level]}, {level: size / lanes.per_device[level]}, {level: float(size)}, together=True)


def is_torus(dims: tuple[int, ...], members: int) -> bool:
    """Whether the dimensions multiply to the members."""
    return prod(dims) == members
