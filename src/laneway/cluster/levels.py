"""From sizes and names of networks to levels: which network joins what where nobody says, and how many links a member has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from laneway.cluster.catalogue import DeviceEntry, network
from laneway.cluster.networks import Network
from laneway.cluster.topology import Level

__all__ = ["WORDS", "Choice", "Shape", "default_choice", "default_links", "even", "make_level", "make_levels", "ports"]

WORDS: dict[str, str] = {
    "node": "",
    "rack": "",
    **dict.fromkeys(("pod", "block", "row", "cell", "island", "cluster"), ""),
    **dict.fromkeys(("zone", "datacenter", "campus", "site", "region", "cloud"), "WAN"),
    **dict.fromkeys(("edge", "home", "member"), "Broadband"),
}
"""What members of a level may be called, and the network that joins them where none is named; "": the fabric inside goes on."""


@dataclass(frozen=True)
class Shape:
    """Members of one level: what they are called, how many in a (full) group, and of each group where they differ."""

    member: str
    size: int
    counts: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Choice:
    """A network that was named for a level; `links` of one member where given."""

    network: Network
    links: int | None = None
    oversubscription: float = 1.0


def even(counts: Sequence[int]) -> tuple[int, tuple[int, ...] | None]:
    """Size and counts of a level with these groups: the counts are left out where they are all the same."""
    size = max(counts)
    return size, None if min(counts) == size else tuple(counts)


def make_level(name: str, shape: Shape, kind: Network, links: int, oversubscription: float = 1.0) -> Level:
    """A level with a network's own numbers."""
    return Level(
        name=name,
        size=shape.size,
        latency_s=kind.latency.value,
        link_bandwidth=kind.bandwidth,
        links=links,
        oversubscription=oversubscription,
        duplex=kind.duplex,
        trusted=kind.trusted,
        joules_per_byte=kind.energy.value,
        network=kind.name,
        source=kind.source,
        counts=shape.counts,
        member=shape.member,
    )


def ports(inside: Sequence[Level]) -> int:
    """Links that a member made of these levels has where nothing narrows it: one for each device of a node, all of a rack's."""
    if len(inside) < 2:
        return inside[0].size if inside else 1
    return inside[-1].links * inside[-1].size


def default_links(kind: Network, inside: Sequence[Level]) -> int:
    """Links of one member where a network is named and their number isn't."""
    return ports(inside) if kind.per_device else 1


def make_levels(entry: DeviceEntry, shapes: Sequence[Shape], choices: Sequence[Choice | None] = ()) -> tuple[Level, ...]:
    """Levels of these shapes, innermost first.

    A member of a named network has as many links as stand in it, else one for each link that leaves what is inside it (RDMA),
    else one. Where no network is named, the members' own word decides (sites and clouds are joined by a WAN), or the fabric
    inside goes on without a bottleneck.

    Args:
        entry: the device.
        shapes: the devices of a node first.
        choices: a network or None for each level; what is missing at the end is None.
    """
    levels: list[Level] = []
    for index, shape in enumerate(shapes):
        choice = (choices[index] if index < len(choices) else None) or default_choice(entry, shape.member, levels)
        links = choice.links if choice.links is not None else default_links(choice.network, levels)
        levels.append(make_level(f"L{index + 1}", shape, choice.network, links, choice.oversubscription))
    return tuple(levels)


def default_choice(entry: DeviceEntry, member: str, inside: Sequence[Level]) -> Choice:
    """What joins members of that name around these levels where no network is named."""
    if not inside:
        return Choice(network(entry.node_network))
    if far := WORDS.get(member):
        return Choice(network(far))
    if len(inside) == 1:
        return Choice(network(entry.fabric))
    return Choice(network(inside[-1].network), ports(inside))
