"""The tree of switches as Slurm's administrators write it."""

from __future__ import annotations

from collections.abc import Mapping

from laneway.cluster.hostlist import expand_hosts
from laneway.core import InputError

__all__ = ["racks_from_switches"]


def racks_from_switches(text: str) -> dict[str, tuple[str, ...]]:
    """Each node's switches, outermost first, from `scontrol show topology` or topology.conf (SwitchName=s0 Nodes=n[1-4]).

    Raises:
        InputError: a line that is no switch, switches in a circle, a node below two lowest switches.
    """
    above: dict[str, str] = {}
    nodes: dict[str, str] = {}
    for line in text.splitlines():
        line = line.split("#")[0].strip()
        if not line:
            continue
        fields = {key.lower(): value for key, _, value in (word.partition("=") for word in line.split())}
        name = fields.get("switchname")
        if not name:
            raise InputError("switches", line[:120], "lines such as SwitchName=s0 Nodes=node[1-4]")
        for child in expand_hosts(fields["switches"], "switches") if fields.get("switches", "(null)") != "(null)" else ():
            above[child] = name
        if fields.get("switches", "(null)") == "(null)" and fields.get("nodes", "(null)") != "(null)":
            for node in expand_hosts(fields["nodes"], "switches"):
                if nodes.setdefault(node, name) != name:
                    raise InputError("switches", node, f"one lowest switch for each node, not {nodes[node]} and {name}")
    return {node: _chain(switch, above) for node, switch in nodes.items()}


def _chain(switch: str, above: Mapping[str, str]) -> tuple[str, ...]:
    chain = [switch]
    while chain[0] in above:
        if above[chain[0]] in chain:
            raise InputError("switches", switch, "switches that form a tree")
        chain.insert(0, above[chain[0]])
    return tuple(chain)
