"""A topology as a table: TOML, JSON or a dict, with every field of a level open to one's own numbers.

    device = "H100"                   # or a table, see `device_from_table`
    [[levels]]                        # innermost first; only the size must be there
    size = 8
    [[levels]]
    size = 32
    network = "NDR400"                # the catalogue's numbers where none stand here
    bandwidth_GB_per_s = 46.0         # of one link and direction, 10⁹ bytes
    latency_us = 9.0
    [racks]                           # or: hosts = ["node[01-64]"]
    a = "node[01-32]"

Instead of device and levels, `topology = "8xH100_32nodes"` takes the short form.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from laneway.cluster.grammar import LARGEST, parse_topology
from laneway.cluster.hostlist import expand_hosts
from laneway.cluster.quantities import known_keys
from laneway.cluster.tables import device_from_table, device_to_table, level_from_table, level_to_table
from laneway.cluster.topology import Level, Topology
from laneway.core import InputError

__all__ = ["is_file_name", "read_topology", "topology_from_dict", "topology_to_dict", "topology_to_toml"]

_KEYS = ("topology", "device", "levels", "hosts", "racks")


def topology_from_dict(table: Mapping[str, Any]) -> Topology:
    """A topology from a table with the keys of this module's head.

    Raises:
        InputError: an unknown key (the accepted ones are named), a value that is none, hosts that don't fit the sizes.
    """
    known_keys("topology", table, _KEYS)
    racks = _racks(table["racks"]) if "racks" in table else None
    if racks is not None and "hosts" in table:
        raise InputError("racks", table["racks"], "hosts or racks, not both")
    hosts = tuple(host for rack in racks for host in rack) if racks is not None else _hosts(table.get("hosts", ()), "hosts")
    if "topology" in table:
        if "device" in table or "levels" in table:
            raise InputError("topology", table["topology"], "either the short form, or device and levels")
        plain = parse_topology(table["topology"])
        topology = Topology(plain.device, plain.levels, hosts)
    else:
        topology = _from_levels(table, hosts, racks)
    if racks is not None:
        _check_racks(topology, racks)
    if topology.world > LARGEST:
        raise InputError("levels", topology.world, f"at most {LARGEST} devices in all")
    return topology


def _from_levels(table: Mapping[str, Any], hosts: tuple[str, ...], racks: list[tuple[str, ...]] | None) -> Topology:
    for key in ("device", "levels"):
        if key not in table:
            raise InputError(key, None, "device and levels, or topology with the short form")
    given = table["levels"]
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise InputError("levels", given, "a list of tables, innermost level first")
    tables = [dict(each) if isinstance(each, Mapping) else each for each in given]
    if racks is not None and all(isinstance(each, dict) for each in tables[1:3]):
        for each, counts in zip(tables[1:3], ([len(rack) for rack in racks], [len(racks)]), strict=False):
            if "size" not in each and "counts" not in each:
                each |= {"counts": counts} if len(set(counts)) > 1 else {"size": counts[0]}
    device, entry = device_from_table(table["device"])
    levels: list[Level] = []
    for index, each in enumerate(tables):
        levels.append(level_from_table(each, f"levels[{index}]", entry, levels))
    return Topology(device, tuple(levels), hosts)


def _check_racks(topology: Topology, racks: Sequence[Sequence[str]]) -> None:
    counts = topology.member_counts(1) if len(topology.levels) > 1 else ()
    if counts != tuple(len(rack) for rack in racks):
        accepted = f"as many hosts in each rack as L2 has nodes in each of its groups: {list(counts)}"
        raise InputError("racks", [len(rack) for rack in racks], accepted)


def _racks(given: object) -> list[tuple[str, ...]]:
    if not isinstance(given, Mapping) or not given:
        raise InputError("racks", given, "a table of racks, each with its hosts")
    return [_hosts(hosts, f"racks.{name}") for name, hosts in given.items()]


def _hosts(given: object, field: str) -> tuple[str, ...]:
    listed = [given] if isinstance(given, str) else given
    if not isinstance(listed, Sequence) or not all(isinstance(each, str) for each in listed):
        raise InputError(field, given, "host names, as a list or as node[01-32]")
    return tuple(host for each in listed for host in expand_hosts(each, field))


def topology_to_dict(topology: Topology) -> dict[str, Any]:
    """The table of a topology: `topology_from_dict` of it gives the same topology, to the last bit."""
    table: dict[str, Any] = {
        "device": device_to_table(topology.device),
        "levels": [level_to_table(level) for level in topology.levels],
    }
    return table | ({"hosts": list(topology.hosts)} if topology.hosts else {})


def topology_to_toml(topology: Topology) -> str:
    """The table as a TOML file's text."""
    import tomli_w

    return tomli_w.dumps(topology_to_dict(topology))


def is_file_name(given: object) -> bool:
    """Whether a text names a file of topology: it ends in .toml or .json."""
    return isinstance(given, str) and given.lower().endswith((".toml", ".json"))


def read_topology(path: str | Path) -> Topology:
    """A topology from a TOML or JSON file. Raises InputError: no such file, not that format, or as `topology_from_dict`."""
    path = Path(path)
    try:
        text = path.read_text("utf-8")
        table = json.loads(text) if path.suffix.lower() == ".json" else tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise InputError("topology", str(path)[:120], "a readable TOML or JSON file of a topology", str(error)[:200]) from error
    if not isinstance(table, Mapping):
        raise InputError("topology", str(path)[:120], "a file with a table of device and levels")
    return topology_from_dict(table)
