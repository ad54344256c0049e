"""The order in which ranks run over hosts: by number rather than by spelling, and with the fewest crossings between racks."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence

from laneway.core import InputError

__all__ = ["crossings", "natural_key", "rank_order"]

Key = tuple[tuple[int, int, str], ...]


def natural_key(name: str) -> tuple[Key, str]:
    """A sorting key that takes numbers as numbers: node7 before node66 before node070 (equal numbers: by spelling)."""
    words = re.findall(r"[0-9]+|[^0-9]+", name)
    return tuple(_word(word) for word in words), name


def _word(word: str) -> tuple[int, int, str]:
    digits = word.lstrip("0")
    return (0, len(digits), digits) if word.isdecimal() else (1, 0, word)


def rank_order(hosts: Sequence[str], racks: Mapping[str, str | Sequence[str]] | None = None) -> tuple[int, ...]:
    """The permutation of these hosts after which a ring crosses between racks as rarely as it can: once for each rack.

    Hosts of a rack come together, in natural order; racks come in the order of their first hosts. A host that stands here
    several times (once for each of its ranks) keeps its ranks together and in their order.

    Args:
        hosts: a host for each rank, or each host once.
        racks: the rack of each host; or its path, outermost first ("zone", "block", "rack"): then each level's groups come
            together. None: one rack.

    Returns:
        Indices into `hosts`: the one that comes first, second, …

    Raises:
        InputError: a host has no rack.
    """
    paths = [_path(host, racks) for host in hosts]
    least: dict[tuple[str, ...], tuple[Key, str]] = {}
    keys = {host: natural_key(host) for host in set(hosts)}
    for host, path in zip(hosts, paths, strict=True):
        for depth in range(1, len(path) + 1):
            domain = path[:depth]
            least[domain] = min(least.get(domain, keys[host]), keys[host])

    def place(index: int) -> tuple[list[tuple[tuple[Key, str], str]], tuple[Key, str], int]:
        path = paths[index]
        domains = [(least[path[:depth]], path[depth - 1]) for depth in range(1, len(path) + 1)]
        return domains, keys[hosts[index]], index

    return tuple(sorted(range(len(hosts)), key=place))


def _path(host: str, racks: Mapping[str, str | Sequence[str]] | None) -> tuple[str, ...]:
    if racks is None:
        return ()
    if host not in racks:
        raise InputError("racks", host, "a rack for each host")
    rack = racks[host]
    return (rack,) if isinstance(rack, str) else tuple(rack)


def crossings(domains: Sequence[Hashable]) -> int:
    """How often a ring over these changes its domain, the step from the last to the first included."""
    return sum(here != there for here, there in zip(domains, [*domains[1:], *domains[:1]], strict=True))
