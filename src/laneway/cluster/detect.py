"""The topology that this process runs in, from the ranks themselves, the launcher, the scheduler or the cluster."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

from laneway.cluster.catalogue import device as catalogued
from laneway.cluster.catalogue import match_device
from laneway.cluster.devices import UNKNOWN
from laneway.cluster.hosts import SWITCH_WORDS, Host, Identity, common_device, hosts_of, topology_of_hosts, with_paths
from laneway.cluster.identity import accelerator_count, accelerator_name, distributed_is_on, gather_identities, own_name
from laneway.cluster.kubernetes import Cluster, kubernetes_cluster
from laneway.cluster.slurm import is_slurm, slurm_device, slurm_hosts
from laneway.cluster.topology import Device, Topology
from laneway.core import InputError

__all__ = ["detect_topology"]

_log = logging.getLogger("laneway")
# World size, ranks of this host, number of hosts, as launchers call them.
LAUNCHERS = (
    ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"),  # torchrun
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", ""),  # mpirun
)


def detect_topology(
    environ: Mapping[str, str] | None = None,
    *,
    device: str | Device | None = None,
    identities: Sequence[Identity] | None = None,
    hosts: Sequence[str] | None = None,
    racks: Mapping[str, str | Sequence[str]] | None = None,
    kubernetes: object = None,
    hypernodes: object = None,
    labels: Sequence[str] = (),
) -> Topology:
    """What joins the devices of this job, in the order in which ranks should run over them.

    The hosts come from the first of these that is there: `identities`; `hosts`; an all-gather among the ranks, if `environ` is
    left out and torch.distributed is initialised (then all ranks must call this); Slurm's variables; those of torchrun or mpirun;
    `kubernetes`; this machine alone. Who shares a machine is never worked out from rank numbers.

    Racks come from `racks`, from `kubernetes`, or from the hosts' own switches (SLURM_TOPOLOGY_ADDR). Networks are the usual ones
    of the device: take `topology_to_toml` of the result and put your own in.

    Args:
        environ: variables to read instead of this process's own.
        device: instead of the one that is found, a catalogue name or one's own.
        identities: where each rank runs.
        hosts: the host of each rank.
        racks: the rack of each host, or its path, outermost first; `switches.racks_from_switches` makes one.
        kubernetes: what `kubectl get nodes -o json` prints, or a table of nodes and their labels.
        hypernodes: what `kubectl get hypernodes -o json` prints.
        labels: which labels say the racks, outermost first, if not the usual ones.

    Raises:
        InputError: a variable that can't be read or contradicts another; hosts of different sizes that only the ranks know; a
            host without a rack; devices of several types.
    """
    live = environ is None
    environ = os.environ if environ is None else environ
    cluster = kubernetes_cluster(kubernetes, hypernodes, labels) if kubernetes is not None else None
    if live and identities is None and hosts is None and distributed_is_on():
        identities = gather_identities()
    if identities is None and hosts is not None:
        identities = [Identity(host, host) for host in hosts]
    found, named = _hosts(environ, identities, cluster, live)
    words: Sequence[str] = SWITCH_WORDS
    if racks is not None:
        found = with_paths(found, racks)
    elif cluster is not None:
        found = with_paths(_by_node_name(found, cluster), {host.name: host.path for host in cluster.hosts})
        words = cluster.words
    return topology_of_hosts(found, _device(device, environ, identities, cluster, live), words, named)


def _hosts(
    environ: Mapping[str, str], identities: Sequence[Identity] | None, cluster: Cluster | None, live: bool
) -> tuple[list[Host], bool]:
    if identities is not None:
        return hosts_of(identities), True
    launched = _launched(environ)
    if is_slurm(environ):
        found, named = slurm_hosts(environ)
        if launched is None or launched[1] == len(found):
            return [replace(host, devices=launched[0]) for host in found] if launched else found, named
    if launched is not None and cluster is not None and len(cluster.hosts) == launched[1]:
        return [replace(host, devices=launched[0]) for host in cluster.hosts], True
    if launched is not None:
        return [Host(f"node{index}", launched[0]) for index in range(launched[1])], False
    if cluster is not None:
        return list(cluster.hosts), True
    return [Host(own_name(environ), max(1, accelerator_count()) if live else 1)], live


def _launched(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """Ranks of a host and number of hosts, as a launcher says; None where none does."""
    for world_name, local_name, groups_name in LAUNCHERS:
        if not environ.get(world_name):
            continue
        if not environ.get(local_name):
            if is_slurm(environ):
                continue  # a script's own WORLD_SIZE; Slurm knows more
            if environ[world_name].strip() == "1":
                return 1, 1
            raise InputError(local_name, None, f"the ranks of a host, beside {world_name}; or initialise torch.distributed first")
        world, local = _integer(environ, world_name), _integer(environ, local_name)
        groups = _integer(environ, groups_name) if environ.get(groups_name) else -(-world // local)
        if world != local * groups:
            accepted = f"{local_name} times the number of hosts ({local} × {groups}): else hosts differ"
            raise InputError(world_name, environ[world_name], accepted, "initialise torch.distributed first: then ranks tell")
        return local, groups
    return None


def _integer(environ: Mapping[str, str], name: str) -> int:
    if not re.fullmatch(r"[0-9]{1,7}", environ[name].strip(), re.ASCII) or int(environ[name]) < 1:
        raise InputError(name, environ[name], "an integer ≥ 1")
    return int(environ[name])


def _by_node_name(hosts: Sequence[Host], cluster: Cluster) -> list[Host]:
    return [replace(host, name=cluster.names.get(host.name, host.name)) for host in hosts]


def _device(
    device: str | Device | None,
    environ: Mapping[str, str],
    identities: Sequence[Identity] | None,
    cluster: Cluster | None,
    live: bool,
) -> Device:
    if device is not None:
        return device if isinstance(device, Device) else catalogued(device)
    names = [identity.device for identity in identities or () if identity.device]
    scheduled = slurm_device(environ) if is_slurm(environ) else None
    own = (accelerator_name() or "") if live and not names else ""
    for said in (names, [own] if own else [], [scheduled] if scheduled else [], list(cluster.devices) if cluster else []):
        if said:
            found = common_device(said) if any(said) else catalogued("GPU")
            return _told(found)
    return _told(catalogued("GPU")) if scheduled is not None else match_device("CPU")


def _told(device: Device) -> Device:
    if device.source.endswith(UNKNOWN):
        _warn_once(device.name)
    return device


@cache
def _warn_once(name: str) -> None:
    _log.warning("laneway: no numbers of a device called %s; those of another stand in. Pass device= to set them", name)
