"""The process groups of every level, made once and in one order on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from laneway.cluster.agree import agree_on_groups
from laneway.cluster.identity import gather_identities
from laneway.cluster.reduce.places import Places, find_places
from laneway.cluster.topology import Topology
from laneway.core import InputError, LanewayError

__all__ = ["LevelGroups"]

MINUTE = timedelta(seconds=60)


class LevelGroups:
    """One rank's groups at every level of the network, innermost first, and one group of all ranks.

    Every group is made twice, so that a pipeline's way up and its way down each have their own order of messages. Every group
    has the timeout that is given (torch's own default for new groups is half an hour, whatever the default group has). All ranks
    must make and close these together.

    Attributes:
        names: of the levels.
        places: who is in which group, on all ranks.
        sizes: members of the largest group of each level.
        ranks: `ranks[level]`, this rank's group: its own number alone where the level joins nothing here, and empty where other
            members act for it further out (ragged hosts).
        up, down: `up[level]`, the process group; None where `ranks[level]` has fewer than two.
        flat: the group of all ranks, its members in topological order: member i is rank `places.order[i]`.
        world, rank: number of ranks, and this one's.
        timeout: of each operation.

    Raises:
        LanewayError: no process group was begun, or ranks ask for different groups.
        InputError: a position for each rank, names for each level, or a timeout above 0 that is missing.
    """

    def __init__(self, places: Places, names: Sequence[str], timeout: timedelta) -> None:
        self.world, self.rank = dist.get_world_size(), dist.get_rank()
        if len(places.order) != self.world:
            raise InputError("positions", len(places.order), f"one for each of the {self.world} ranks")
        if len(names) != len(places.groups) or len(set(names)) != len(names):
            raise InputError("names", tuple(names), f"{len(places.groups)} different names, the innermost level's first")
        if not isinstance(timeout, timedelta) or timeout <= timedelta(0):
            raise InputError("timeout", timeout, "a timedelta above 0")
        self.names, self.places, self.sizes, self.timeout = tuple(names), places, places.sizes, timeout
        self.ranks = places.of_rank(self.rank)
        agree_on_groups((places, self.names), _device(), "the ranks ask for different groups: their positions or names differ")
        self.flat: dist.ProcessGroup = self._make(places.order, "flat")
        self.up, self.down = self._make_levels("up"), self._make_levels("down")
        self._closed = False

    @classmethod
    def from_positions(
        cls, positions: Sequence[Sequence[int | str]], *, names: Sequence[str] = (), timeout: timedelta = MINUTE
    ) -> LevelGroups:
        """Groups of ranks whose places are known.

        Args:
            positions: of rank 0, 1, …: outermost first, (rack, host). Ranks with the same position share a host. Hosts and racks
                of different sizes are allowed; () for all ranks makes a single level.
            names: of the levels, innermost first; by default L1, L2, …
            timeout: of each operation.
        """
        _check_begun()
        places = find_places(positions)
        return cls(places, names or [f"L{level + 1}" for level in range(len(places.groups))], timeout)

    @classmethod
    def from_topology(cls, topology: Topology, *, order: Sequence[int] | None = None, timeout: timedelta = MINUTE) -> LevelGroups:
        """Groups along the levels of a topology.

        Args:
            topology: of as many devices as there are ranks.
            order: the rank at each of its places, as `cluster.order.verify_order` finds it; None: rank = place.
            timeout: of each operation.
        """
        _check_begun()
        ranks = list(range(topology.world)) if order is None else list(order)
        if sorted(ranks) != list(range(topology.world)):
            raise InputError("order", ranks[:16], f"a permutation of the ranks 0 to {topology.world - 1}")
        positions: list[list[int | str]] = [[] for _ in ranks]
        for level in reversed(range(len(topology.levels) - 1)):
            for number, group in enumerate(topology.groups(level)):
                for place in group:
                    positions[ranks[place]].append(number)
        return cls(find_places(positions), [level.name for level in topology.levels], timeout)

    @classmethod
    def detect(cls, *, timeout: timedelta = MINUTE) -> LevelGroups:
        """Groups by where the ranks say they run, whatever their numbers. All ranks must call it."""
        from laneway.cluster.detect import detect_topology
        from laneway.cluster.order import verify_order

        _check_begun()
        identities = gather_identities()
        topology = detect_topology(identities=identities)
        return cls.from_topology(topology, order=verify_order(identities, topology).order, timeout=timeout)

    def close(self) -> None:
        """Destroy the groups; a second call does nothing. Nothing may be under way in them."""
        if self._closed:
            return
        self._closed = True
        for group in (self.flat, *self.up, *self.down):
            if group is not None:
                dist.destroy_process_group(group)

    def _make_levels(self, way: str) -> list[dist.ProcessGroup | None]:
        mine: list[dist.ProcessGroup | None] = []
        for name, groups, own in zip(self.names, self.places.groups, self.ranks, strict=True):
            made = {ranks: self._make(ranks, f"{name}_{way}") for ranks in groups if len(ranks) > 1}
            mine.append(made.get(own))
        return mine

    def _make(self, ranks: Sequence[int], name: str) -> Any:
        return dist.new_group(list(ranks), timeout=self.timeout, sort_ranks=False, group_desc=f"laneway_{name}")


def _check_begun() -> None:
    if not dist.is_initialized():
        raise LanewayError("level groups need a process group: call torch.distributed.init_process_group first")


def _device() -> torch.device:
    """Where the default group's backend takes tensors from."""
    if "gloo" in str(dist.get_backend_config()):
        return torch.device("cpu")
    return torch.accelerator.current_accelerator() or torch.device("cpu")
