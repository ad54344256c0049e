"""The order of ranks: whether they sit where a topology says they do, and the order in which they do if not."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from laneway.cluster.hosts import Host, Identity, hosts_of, informative
from laneway.cluster.sequence import crossings, natural_key, rank_order
from laneway.cluster.topology import Topology
from laneway.core import InputError

__all__ = ["Placement", "crossings", "natural_key", "rank_order", "verify_order"]

MOST_SHOWN, MOST_TOLD = 4, 12


@dataclass(frozen=True)
class Placement:
    """Ranks laid over a topology.

    Attributes:
        topology: the topology.
        order: the rank at each of its places: `order[0]` sits on the first device of the first host.
        problems: what doesn't fit in the ranks' own order, in words; empty where it fits, and then `order` is 0, 1, 2, …
    """

    topology: Topology
    order: tuple[int, ...]
    problems: tuple[str, ...] = ()

    @property
    def matches(self) -> bool:
        """Whether the ranks' own order fits the topology."""
        return not self.problems

    def groups(self, level: int) -> tuple[tuple[int, ...], ...]:
        """Ranks of each group of a level, to be made with `torch.distributed.new_group(ranks, sort_ranks=False)`."""
        return tuple(tuple(self.order[place] for place in group) for group in self.topology.groups(level))


def verify_order(identities: Sequence[Identity], topology: Topology) -> Placement:
    """Compare where ranks run with where a topology says they do, and put right what doesn't fit.

    Which ranks share a machine is read from their identities, never from `rank // devices`. Racks are compared as far as the
    identities' paths tell them.

    Args:
        identities: of rank 0, 1, …; `laneway.cluster.identity.gather_identities()` collects them.
        topology: what is expected.

    Raises:
        InputError: another number of ranks; hosts whose numbers of devices, racks or names don't fit the topology in any order.
    """
    if len(identities) != topology.world:
        raise InputError("world", len(identities), f"{topology.world} ranks, which {topology} has")
    hosts = hosts_of(identities)
    numbers = {machine: n for n, machine in enumerate(dict.fromkeys(identity.machine for identity in identities))}
    ranks: list[list[int]] = [[] for _ in hosts]
    for rank, identity in enumerate(identities):
        ranks[numbers[identity.machine]].append(rank)
    machines = [numbers[identity.machine] for identity in identities]
    racks = list(informative([host.path for host in hosts]).values())
    problems = _problems(topology, hosts, machines, racks)
    if not problems:
        return Placement(topology, tuple(range(len(identities))))
    order = _arranged(topology, hosts, racks)
    shown = problems[:MOST_TOLD] + ([f"and {len(problems) - MOST_TOLD} more"] if len(problems) > MOST_TOLD else [])
    return Placement(topology, tuple(rank for host in order for rank in ranks[host]), tuple(shown))


def _problems(topology: Topology, hosts: Sequence[Host], machines: Sequence[int], racks: Sequence[Sequence[int]]) -> list[str]:
    found = []
    slots = topology.groups(0)
    for slot, group in enumerate(slots):
        names = list(dict.fromkeys(hosts[machines[rank]].name for rank in group))
        if len(names) > 1:
            found.append(f"ranks {group[0]} to {group[-1]} are one group of L1 but run on {', '.join(names[:MOST_SHOWN])}")
        elif topology.hosts and names != [topology.hosts[slot]]:
            found.append(f"ranks {group[0]} to {group[-1]} should run on {topology.hosts[slot]} but run on {names[0]}")
    for index, groups in enumerate(racks):
        level = index + 1
        domains = [groups[machine] for machine in machines]
        if level < len(topology.levels) - 1:
            for group in topology.groups(level):
                if len({domains[rank] for rank in group}) > 1:
                    name = topology.levels[level].name
                    found.append(f"ranks {group[0]} to {group[-1]} are one group of {name} but stand in several racks")
        ring, fewest = crossings(domains), len(set(groups))
        if ring > fewest and not topology.hosts:
            found.append(f"a ring in rank order crosses between racks {ring} times, {fewest} would do")
    return found


def _arranged(topology: Topology, hosts: Sequence[Host], racks: Sequence[Sequence[int]]) -> list[int]:
    """Indices of hosts in the order of the topology's slots."""
    if topology.hosts:
        return _by_name(topology, hosts)
    paths = {host.name: [str(groups[i]) for groups in reversed(racks)] for i, host in enumerate(hosts)}
    order = rank_order([host.name for host in hosts], paths)
    depth = max(0, min(len(racks), len(topology.levels) - 2))
    slots: list[Tree] = list(topology.member_counts(0))
    for level in range(1, depth + 1):
        ahead = iter(slots)
        slots = [[next(ahead) for _ in range(count)] for count in topology.member_counts(level)]
    found = _match(slots, _nested(order, racks[:depth][::-1]), [host.devices for host in hosts])
    if found is None:
        there = _sizes([hosts[index].devices for index in order]) + (f" in {len(set(racks[0]))} racks" if racks else "")
        raise InputError("topology", str(topology), f"a topology of the hosts there are: {there}")
    return found


def _sizes(devices: Sequence[int]) -> str:
    return f"{len(devices)} with {', '.join(map(str, devices[:12]))}{', …' if len(devices) > 12 else ''} ranks"


def _by_name(topology: Topology, hosts: Sequence[Host]) -> list[int]:
    indices = {host.name: index for index, host in enumerate(hosts)}
    missing = sorted(set(topology.hosts) - set(indices))
    if missing or len(indices) != len(topology.hosts):
        extra = sorted(set(indices) - set(topology.hosts))
        accepted = (
            f"the hosts of the topology; missing: {', '.join(missing[:8]) or 'none'}; not in it: {', '.join(extra[:8]) or 'none'}"
        )
        raise InputError("hosts", sorted(indices)[:8], accepted)
    order = [indices[name] for name in topology.hosts]
    for name, index, count in zip(topology.hosts, order, topology.member_counts(0), strict=True):
        if hosts[index].devices != count:
            raise InputError(f"hosts.{name}", hosts[index].devices, f"{count} ranks on it, as the topology says")
    return order


Tree = int | list["Tree"]


def _nested(order: Sequence[int], racks: Sequence[Sequence[int]]) -> list[Tree]:
    """Hosts within their racks; the outermost racks come first in `racks`."""
    if not racks:
        return list(order)
    return [_nested(list(run), racks[1:]) for _, run in groupby(order, key=racks[0].__getitem__)]


def _shape(tree: Tree, devices: Sequence[int] | None = None) -> tuple[Any, ...]:
    """Equal for trees that differ only in the order of what is in them; leaves count as the devices they have."""
    if isinstance(tree, int):
        return (tree if devices is None else devices[tree],)
    return tuple(sorted(_shape(each, devices) for each in tree))


def _match(slots: Tree, hosts: Tree, devices: Sequence[int]) -> list[int] | None:
    """Hosts in the order of slots of the same shape, first come first; None where shapes differ."""
    if _shape(slots) != _shape(hosts, devices):
        return None
    if isinstance(slots, int) or isinstance(hosts, int):
        return [hosts] if isinstance(hosts, int) else None
    free: dict[tuple[Any, ...], deque[Tree]] = {}
    for host in hosts:
        free.setdefault(_shape(host, devices), deque()).append(host)
    parts = [_match(slot, free[_shape(slot)].popleft(), devices) for slot in slots]
    return [host for part in parts if part is not None for host in part]
