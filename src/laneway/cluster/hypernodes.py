"""Volcano's HyperNodes: which of them each node stands below (topology.volcano.sh/v1alpha1)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from laneway.core import InputError

__all__ = ["hypernode_paths"]


def hypernode_paths(items: Sequence[Any], nodes: Mapping[str, Mapping[str, str]]) -> list[tuple[str, ...]]:
    """The HyperNodes above each node, outermost first.

    Args:
        items: HyperNodes as `kubectl get hypernodes -o json` lists them.
        nodes: labels of each node.

    Raises:
        InputError: no HyperNode; a member that can't be read or has two parents; a circle.
    """
    specs = dict(_spec(item) for item in items)
    candidates = {"Node": nodes, "HyperNode": {name: {} for name in specs}}
    above: dict[tuple[str, str], str] = {}
    for name, spec in specs.items():
        members = spec.get("members") or []
        if not isinstance(members, list):
            raise InputError(f"hypernodes.{name}", str(members)[:60], "a list of members")
        for member in members:
            kind = member.get("type") if isinstance(member, Mapping) else None
            if not isinstance(kind, str) or kind not in candidates:
                raise InputError(f"hypernodes.{name}", kind, "members of type Node or HyperNode")
            for child in _selected(name, member.get("selector"), candidates[kind]):
                if above.setdefault((kind, child), name) != name:
                    raise InputError(
                        f"hypernodes.{name}", child, f"members of one HyperNode only, not of {above[kind, child]} too"
                    )
    return [_upwards(node, above) for node in nodes]


def _spec(item: object) -> tuple[str, Mapping[str, Any]]:
    spec = item.get("spec") if isinstance(item, Mapping) else None
    metadata = item.get("metadata") if isinstance(item, Mapping) else None
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    if not isinstance(name, str) or not isinstance(spec, Mapping):
        raise InputError("hypernodes", str(item)[:60], "HyperNodes with metadata.name and spec")
    return name, spec


def _selected(hypernode: str, selector: object, candidates: Mapping[str, Mapping[str, str]]) -> list[str]:
    field = f"hypernodes.{hypernode}.selector"
    if isinstance(selector, Mapping) and isinstance(exact := selector.get("exactMatch"), Mapping):
        return [name for name in candidates if name == exact.get("name")]
    if isinstance(selector, Mapping) and isinstance(pattern := selector.get("regexMatch"), Mapping):
        try:
            expression = re.compile(str(pattern.get("pattern")))
        except re.error as error:
            raise InputError(field, pattern.get("pattern"), "a regular expression", str(error)) from None
        return [name for name in candidates if expression.search(name)]
    if isinstance(selector, Mapping) and isinstance(match := selector.get("labelMatch"), Mapping):
        wanted = match.get("matchLabels")
        if isinstance(wanted, Mapping) and wanted and not match.get("matchExpressions"):
            return [name for name, labels in candidates.items() if all(labels.get(key) == value for key, value in wanted.items())]
    raise InputError(field, str(selector)[:80], "exactMatch.name, regexMatch.pattern or labelMatch.matchLabels")


def _upwards(node: str, above: Mapping[tuple[str, str], str]) -> tuple[str, ...]:
    chain: list[str] = []
    key = ("Node", node)
    while key in above:
        if above[key] in chain:
            raise InputError("hypernodes", above[key], "HyperNodes that form a tree")
        chain.insert(0, above[key])
        key = ("HyperNode", above[key])
    return tuple(chain)
