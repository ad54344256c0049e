"""The short form of a topology, written: what `grammar` reads."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from laneway.cluster.catalogue import network
from laneway.cluster.grammar import parse_topology
from laneway.cluster.levels import Shape, default_links, make_level
from laneway.cluster.topology import Level, Topology
from laneway.core import InputError

__all__ = ["format_topology", "short_form"]


def format_topology(topology: Topology) -> str:
    """The short form, such that `parse_topology` of it gives the same topology.

    Raises:
        InputError: it has none: a device or a network of one's own, hosts, groups that differ within one rack or site.
    """
    text = short_form(topology)
    if _parsed(text) != topology:
        raise InputError("topology", text, "a topology of catalogued devices and networks without hosts; write it as a file")
    return text


def short_form(topology: Topology) -> str:
    """The short form of any topology, for people to read. What the grammar has no words for is written `custom` or `ragged`."""
    parts = _uniform_parts(topology)
    if parts is None:
        return f"{topology.world}x{topology.device.name}_ragged"
    body = "+".join(_sizes(topology, sizes) for sizes in parts)
    plain = _parsed(body)
    if plain is not None and plain.levels == topology.levels:
        return body
    levels = topology.levels
    written = [_network(levels, index) for index in range(len(levels))]
    inside_first = len(levels) == 1 or plain is None or levels[0] != plain.levels[0] or _in_node(levels[1])
    return f"{body}@{'/'.join(written if inside_first else written[1:])}"


def _parsed(text: str) -> Topology | None:
    try:
        return parse_topology(text)
    except InputError:
        return None


def _sizes(topology: Topology, sizes: Sequence[int]) -> str:
    words = [f"{sizes[0]}x{topology.device.name}"]
    for size, level in zip(sizes[1:], topology.levels[1:], strict=True):
        words.append(f"{size}{level.member or 'custom'}{'s' if size != 1 else ''}")
    return "_".join(words)


def _uniform_parts(topology: Topology) -> list[tuple[int, ...]] | None:
    """Runs of outermost members that are alike, each with its sizes, innermost first; None where one isn't even inside."""
    levels = topology.levels
    if all(level.counts is None for level in levels):
        return [tuple(level.size for level in levels)]
    alike: list[tuple[int, ...]] = [(count,) for count in topology.member_counts(0)]
    for index in range(1, len(levels) - 1):
        inside = iter(alike)
        groups = [[next(inside) for _ in range(count)] for count in topology.member_counts(index)]
        if any(len(set(group)) > 1 for group in groups):
            return None
        alike = [(*group[0], len(group)) for group in groups]
    return [(*sizes, len(list(run))) for sizes, run in groupby(alike)]


def _in_node(level: Level) -> bool:
    try:
        return network(level.network).in_node
    except InputError:
        return False


def _network(levels: Sequence[Level], index: int) -> str:
    level = levels[index]
    try:
        kind = network(level.network)
    except InputError:
        return "custom"
    shape = Shape(level.member, level.size, level.counts)
    if make_level(level.name, shape, kind, level.links, level.oversubscription) != level:
        return "custom"
    links = "" if level.links == default_links(kind, levels[:index]) else f"{level.links}x"
    exact = repr(float(level.oversubscription)).removesuffix(".0")
    return f"{links}{kind.name}" + ("" if level.oversubscription == 1 else f":{exact}")
