"""Communication of one layout: what each group sends in a step, how long it takes, and how much of it is hidden."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil, log2

from laneway.cluster.architecture import Architecture
from laneway.cluster.costs.calibration import Calibration
from laneway.cluster.costs.choice import price
from laneway.cluster.costs.collectives import collective_bytes
from laneway.cluster.costs.placement import Group
from laneway.cluster.costs.sizes import head_size
from laneway.cluster.layout import Layout
from laneway.cluster.topology import Topology

__all__ = ["Traffic", "TrafficModel"]


@dataclass(frozen=True)
class Traffic:
    """Seconds, and bytes that leave one device by level name."""

    seconds: float = 0.0
    nbytes: Mapping[str, float] = field(default_factory=dict)

    def __add__(self, other: Traffic) -> Traffic:
        names = {**self.nbytes, **other.nbytes}
        return Traffic(
            self.seconds + other.seconds, {name: self.nbytes.get(name, 0.0) + other.nbytes.get(name, 0.0) for name in names}
        )

    def times(self, count: float) -> Traffic:
        """`count` of them one after the other."""
        return Traffic(self.seconds * count, {name: nbytes * count for name, nbytes in self.nbytes.items()})


NONE = Traffic()
_KNOWN: dict[tuple[object, ...], Traffic] = {}
"""Prices of collectives so far: a planner asks for the same few many times. `Topology` itself can't be hashed."""
_MOST = 65536


@dataclass(frozen=True)
class TrafficModel:
    """Prices the collectives of one layout.

    `algorithm`: of weights, gradients and experts; tensor and pipeline parallelism always go natively.
    """

    arch: Architecture
    layout: Layout
    topology: Topology
    seq_len: int
    calibration: Calibration
    algorithm: str = "auto"

    def _one(self, op: str, nbytes: float, group: Group, algorithm: str = "native") -> Traffic:
        if group.size == 1 or nbytes == 0:
            return NONE
        key = (op, nbytes, group, algorithm, self.topology.levels, self.topology.device.name, self.calibration)
        found = _KNOWN.get(key)
        if found is None:
            name, seconds = price(op, nbytes, self.topology, group, algorithm, self.calibration)
            found = Traffic(seconds.value, collective_bytes(op, nbytes, self.topology, algorithm=name, group=group))
            if len(_KNOWN) > _MOST:
                _KNOWN.clear()
            _KNOWN[key] = found
        return found

    @property
    def _tokens(self) -> int:
        return self.layout.micro_batch * ceil(self.seq_len / self.layout.cp)

    @property
    def _element(self) -> int:
        return 4 if self.layout.precision == "fp32" else 2

    def tensor(self) -> Traffic:
        """One pass of a layer over one micro-batch: two all-reduces of s·b·h (or scatters and gathers of the same bytes).

        A level's bandwidth is that of one group alone in a node; `Calibration.crowding` says what others beside it cost.
        """
        nbytes = self._tokens * self.arch.hidden * self._element
        messages = self._one("all_reduce", nbytes, Group(self.layout.tp)).times(2)
        groups = max(1.0, min(self.topology.levels[0].size, self.layout.world) / self.layout.tp)
        return replace(messages, seconds=messages.seconds * (1 + self.calibration.crowding * log2(groups)))

    def context(self) -> Traffic:
        """One forward pass of ring attention: keys and values of all other ranks, a neighbour's at a time."""
        kv = 2 * self.arch.kv_heads * head_size(self.arch) / self.layout.tp
        message = self._one("p2p", self._tokens * kv * self._element, self._pair(self.layout.tp, self.layout.cp))
        return message.times(self.layout.cp - 1)

    def expert(self) -> Traffic:
        """One pass of a mixture-of-experts layer: tokens to their experts, and back."""
        if not self.arch.experts:
            return NONE
        nbytes = self._tokens * self.arch.experts_per_token * self.arch.hidden * self._element
        return self._one("all_to_all", nbytes, Group(self.layout.ep, self.layout.tp), self.algorithm).times(2)

    def boundary(self) -> Traffic:
        """One micro-batch's streams to the next pipeline rank, over the outermost level that any of these hops crosses: the
        slowest sets the pace. Each tensor-parallel rank sends its part.

        Without sequence parallelism the parts are gathered again on arrival ("scatter/gather", Narayanan et al. 2021).
        """
        layout = self.layout
        nbytes = self._tokens * self.arch.streams * self.arch.hidden * self._element
        message = self._one("p2p", nbytes / layout.tp, Group(layout.pp, layout.tp * layout.cp * layout.dp))
        if layout.pp == 1 or layout.sequence_parallel:
            return message
        return message + self._one("all_gather", nbytes, Group(layout.tp))

    def _pair(self, stride: int, size: int) -> Group:
        return Group(min(2, size), stride)

    def gather(self, parameters: float, shards: Group, messages: int = 1) -> Traffic:
        """Weights of a device from all ranks that share them, in so many messages one after the other."""
        return self._several("all_gather", parameters * self._element, shards, messages)

    def scatter(self, parameters: float, shards: Group, messages: int = 1) -> Traffic:
        """Gradients reduced to the ranks that share them."""
        return self._several("reduce_scatter", parameters * self.layout.grad_bytes, shards, messages)

    def replicate(self, parameters: float, messages: int = 1) -> Traffic:
        """Gradients reduced over replicas; `parameters`: those whose gradients one device holds then."""
        inner = self.layout.tp * self.layout.cp * self.layout.dp_shard
        return self._several("all_reduce", parameters * self.layout.grad_bytes, Group(self.layout.dp_replicate, inner), messages)

    def _several(self, op: str, nbytes: float, group: Group, messages: int) -> Traffic:
        return self._one(op, nbytes / messages, group, self.algorithm).times(messages)
