"""Hosts, devices and racks from what Kubernetes says of its nodes: labels, and Volcano's HyperNodes.

kubectl get nodes -o json            labels, GPUs and names
kubectl get hypernodes -o json       Volcano's tree of switches (topology.volcano.sh/v1alpha1)
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from laneway.cluster.hosts import SWITCH_WORDS, Host
from laneway.cluster.hypernodes import hypernode_paths
from laneway.core import InputError

__all__ = ["Cluster", "kubernetes_cluster"]

# Outermost first: what members of a level are called, and labels that may tell it; the first one that every node has counts.
TIERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("region", ("topology.kubernetes.io/region", "failure-domain.beta.kubernetes.io/region")),
    ("zone", ("topology.kubernetes.io/zone", "failure-domain.beta.kubernetes.io/zone")),
    (
        "cell",
        (
            "fabric.topograph.run/tier-2",
            "network.topology.nvidia.com/core",
            "network.topology.nvidia.com/datacenter",
            "topology.k8s.aws/network-node-layer-1",
        ),
    ),
    (
        "block",
        (
            "fabric.topograph.run/tier-1",
            "network.topology.nvidia.com/spine",
            "topology.k8s.aws/network-node-layer-2",
            "cloud.google.com/gce-topology-block",
            "cloud.provider.com/topology-block",
            "topology-spine",
        ),
    ),
    (
        "rack",
        (
            "topology.kubernetes.io/rack",
            "fabric.topograph.run/tier-0",
            "network.topology.nvidia.com/leaf",
            "network.topology.nvidia.com/block",
            "topology.k8s.aws/network-node-layer-3",
            "cloud.google.com/gce-topology-subblock",
            "cloud.provider.com/topology-rack",
            "topology-rack",
            "rack",
        ),
    ),
)
GPU_RESOURCES = ("nvidia.com/gpu", "amd.com/gpu")
GPU_PRODUCTS = ("nvidia.com/gpu.product", "amd.com/gpu.product-name", "cloud.google.com/gke-accelerator")
ACCEPTED = "what `kubectl get nodes -o json` prints, or a table of nodes with their labels"


@dataclass(frozen=True)
class Cluster:
    """Nodes of a Kubernetes cluster that can take part.

    Attributes:
        hosts: with their GPUs, or one device each where no node has any.
        words: what their groups are called from racks outwards.
        devices: what the nodes call their GPUs; empty where none says.
        names: other names of a host ("kubernetes.io/hostname", addresses) and the node's own.
    """

    hosts: tuple[Host, ...]
    words: tuple[str, ...]
    devices: tuple[str, ...]
    names: Mapping[str, str]


def kubernetes_cluster(nodes: object, hypernodes: object = None, labels: Sequence[str] = ()) -> Cluster:
    """Read nodes, and the racks that they stand in.

    Args:
        nodes: JSON of `kubectl get nodes -o json` (text or read already), or a table: node → its labels.
        hypernodes: JSON of `kubectl get hypernodes -o json`: then these say the racks, not the labels.
        labels: keys of labels of one's own, outermost first: then only these say the racks.

    Raises:
        InputError: not that, or no node in it; a node without one of the given labels; a HyperNode that can't be read.
    """
    found = [_node(item) for item in items_of(nodes, "kubernetes", ACCEPTED)]
    if not found:
        raise InputError("kubernetes", "no node", ACCEPTED)
    with_gpus = [node for node in found if node["gpus"]] or found
    if hypernodes is not None:
        accepted = "what `kubectl get hypernodes -o json` prints"
        listed = items_of(hypernodes, "hypernodes", accepted)
        paths = hypernode_paths(listed, {node["name"]: node["labels"] for node in with_gpus})
        words: tuple[str, ...] = SWITCH_WORDS
    else:
        keys = [("", key) for key in labels] or _present(with_gpus)
        paths = [tuple(_label(node, key) for _, key in keys) for node in with_gpus]
        words = tuple(reversed([word for word, _ in keys])) if not labels else SWITCH_WORDS
    hosts = tuple(Host(n["name"], n["gpus"] or 1, path) for n, path in zip(with_gpus, paths, strict=True))
    products = [n["labels"][key] for n in with_gpus for key in GPU_PRODUCTS if key in n["labels"]]
    names = {alias: node["name"] for node in with_gpus for alias in (*node["aliases"], node["name"])}
    return Cluster(hosts, words, tuple(dict.fromkeys(products)) or (("",) if with_gpus[0]["gpus"] else ()), names)


def items_of(given: object, field: str, accepted: str) -> list[Any]:
    if isinstance(given, str | bytes):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise InputError(field, str(given)[:60], accepted, str(error)[:120]) from None
    if isinstance(given, Mapping) and isinstance(given.get("items"), list):
        return given["items"]
    if isinstance(given, Mapping) and "metadata" in given and "kind" in given:
        return [given]
    if isinstance(given, Mapping):
        return [{"metadata": {"name": name, "labels": labels}} for name, labels in given.items()]
    if isinstance(given, list):
        return given
    raise InputError(field, str(given)[:60], accepted)


def _node(item: object) -> dict[str, Any]:
    metadata = item.get("metadata") if isinstance(item, Mapping) else None
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    labels = metadata.get("labels") or {} if isinstance(metadata, Mapping) else None
    if not isinstance(name, str) or not name or not isinstance(labels, Mapping):
        raise InputError("kubernetes", str(item)[:60], ACCEPTED)
    labels = {str(key): str(value) for key, value in labels.items()}
    status = item.get("status") if isinstance(item, Mapping) else None
    status = status if isinstance(status, Mapping) else {}
    aliases = [labels.get("kubernetes.io/hostname", name)]
    addresses = status.get("addresses")
    aliases += (
        [str(each.get("address")) for each in addresses if isinstance(each, Mapping)] if isinstance(addresses, list) else []
    )
    return {"name": name, "labels": labels, "gpus": _gpus(name, labels, status), "aliases": aliases}


def _gpus(name: str, labels: Mapping[str, str], status: Mapping[str, Any]) -> int:
    for holder in ("allocatable", "capacity"):
        resources = status.get(holder)
        for resource in GPU_RESOURCES:
            if isinstance(resources, Mapping) and resource in resources:
                return _integer(f"kubernetes.{name}.{resource}", str(resources[resource]))
    return _integer(f"kubernetes.{name}.nvidia.com/gpu.count", labels.get("nvidia.com/gpu.count", "0"))


def _integer(field: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,6}", text, re.ASCII):
        raise InputError(field, text, "a number of GPUs")
    return int(text)


def _present(nodes: Iterable[Mapping[str, Any]]) -> list[tuple[str, str]]:
    nodes = list(nodes)
    found = []
    for word, keys in TIERS:
        key = next((key for key in keys if all(key in node["labels"] for node in nodes)), None)
        found += [(word, key)] if key else []
    return found


def _label(node: Mapping[str, Any], key: str) -> str:
    if key not in node["labels"]:
        raise InputError(f"kubernetes.{node['name']}", key, "a label that every node has")
    return node["labels"][key]
