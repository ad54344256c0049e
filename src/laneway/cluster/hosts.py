"""From what is known of hosts to a topology: which devices each has, and which racks, blocks and zones it stands in."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from laneway.cluster.catalogue import DEVICES, DeviceEntry, match_device
from laneway.cluster.levels import Shape, even, make_levels
from laneway.cluster.sequence import rank_order
from laneway.cluster.topology import Device, Topology
from laneway.core import InputError

__all__ = ["Host", "Identity", "common_device", "hosts_of", "informative", "topology_of_hosts", "with_paths"]

_log = logging.getLogger("laneway")
SWITCH_WORDS = ("rack", "pod", "cell", "island", "row", "block", "cluster")


@dataclass(frozen=True)
class Identity:
    """Where one rank runs.

    Attributes:
        machine: equal for two ranks exactly if they share a machine (and container).
        name: the machine's name, by which it is ordered and looked up.
        path: the switches, racks or zones it stands in, outermost first, where known.
        device: what the driver calls the device; "" for none.
    """

    machine: str
    name: str
    path: tuple[str, ...] = ()
    device: str = ""


@dataclass(frozen=True)
class Host:
    """A machine: its name, the devices that take part, and its path, outermost first."""

    name: str
    devices: int
    path: tuple[str, ...] = ()


def hosts_of(identities: Sequence[Identity]) -> list[Host]:
    """The machines of these ranks. Machines that go by one name are told apart by a number."""
    ranks: dict[str, list[Identity]] = {}
    for identity in identities:
        ranks.setdefault(identity.machine, []).append(identity)
    hosts, seen = [], dict.fromkeys((group[0].name for group in ranks.values()), 0)
    for group in ranks.values():
        name = group[0].name
        seen[name] += 1
        hosts.append(Host(name if seen[name] == 1 else f"{name}~{seen[name]}", len(group), group[0].path))
    return hosts


def informative(paths: Sequence[tuple[str, ...]]) -> dict[int, list[int]]:
    """Levels of these paths that tell hosts apart, innermost first: by how far out, the number of the group of each host.

    A level is left out if one group holds all hosts, if each host is a group of its own, or if it groups as the one inside it.
    Where paths are known of some hosts only, none is.
    """
    depth = min((len(path) for path in paths), default=0)
    if depth == 0 and any(paths):
        _log.warning("laneway: racks are known for some hosts only, and are left out")
    found: dict[int, list[int]] = {}
    for cut in range(depth):
        numbers: dict[tuple[str, ...], int] = {}
        groups = [numbers.setdefault(path[: len(path) - cut], len(numbers)) for path in paths]
        if 1 < len(numbers) < len(paths) and groups not in found.values():
            found[cut] = groups
    return found


def topology_of_hosts(hosts: Sequence[Host], device: Device, words: Sequence[str] = SWITCH_WORDS, named: bool = True) -> Topology:
    """The topology of these hosts, in rank order.

    Args:
        hosts: at least one.
        device: the device of all of them.
        words: what members are called from racks outwards.
        named: whether the names are real ones, to be kept.
    """
    if not hosts:
        raise InputError("hosts", hosts, "at least one host")
    found = informative([host.path for host in hosts])
    paths = {host.name: [str(groups[i]) for groups in reversed(found.values())] for i, host in enumerate(hosts)}
    order = rank_order([host.name for host in hosts], paths)
    ordered = [hosts[index] for index in order]
    shapes = [Shape("device", *even([host.devices for host in ordered]))]
    members: list[tuple[str, ...]] = [tuple(paths[host.name]) for host in ordered]
    if len(hosts) > 1:
        for word in ("node", *(words[min(cut, len(words) - 1)] for cut in found)):
            if not members[0]:
                shapes.append(Shape(word, len(members)))
                break
            groups = [(path, len(list(run))) for path, run in groupby(members)]
            shapes.append(Shape(word, *even([count for _, count in groups])))
            members = [path[:-1] for path, _ in groups]
    names = tuple(host.name for host in ordered) if named else ()
    return Topology(device, make_levels(_entry(device), shapes), names)


def _entry(device: Device) -> DeviceEntry:
    """The catalogue's entry whose usual networks serve: the device's own, or those of an unknown accelerator."""
    return DEVICES.get(device.name, DEVICES["GPU"])


def with_paths(hosts: Sequence[Host], racks: Mapping[str, str | Sequence[str]]) -> list[Host]:
    """The same hosts with the racks that a table gives them; a full name is also found by its first part."""
    found = []
    for host in hosts:
        rack = racks.get(host.name, racks.get(host.name.split(".")[0]))
        if rack is None:
            raise InputError("racks", host.name, f"a rack for each host; there are {', '.join(list(racks)[:8]) or 'none'}")
        found.append(replace(host, path=(rack,) if isinstance(rack, str) else tuple(rack)))
    return found


def common_device(names: Sequence[str]) -> Device:
    """The one device that these names mean. Raises InputError: they mean several."""
    found = {name: match_device(name) for name in dict.fromkeys(names)}
    if len({device.name for device in found.values()}) != 1:
        raise InputError("device", sorted(found), "devices of one type, or the one to plan for as `device`")
    return next(iter(found.values()))
