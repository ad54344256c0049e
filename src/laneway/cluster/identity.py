"""Which machine a rank runs on, found out by the ranks themselves. torch is imported only where ranks talk to each other."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from laneway.cluster.hosts import Identity
from laneway.cluster.slurm import switch_path

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["accelerator_count", "accelerator_name", "distributed_is_on", "gather_identities", "own_identity", "own_name"]

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def own_identity(environ: Mapping[str, str] | None = None) -> Identity:
    """The identity of this process.

    The machine is told by host name and boot id together, as NCCL tells it: two containers on one machine have a boot id in
    common but reach each other only through the network, and two machines may go by one host name. NCCL_HOSTID, where set, says
    otherwise. The name is NODE_NAME (as pods are given it), SLURMD_NODENAME or the host name.
    """
    environ = os.environ if environ is None else environ
    host = socket.gethostname()
    machine = environ.get("NCCL_HOSTID") or f"{host}/{_boot_id()}"
    return Identity(machine, own_name(environ), switch_path(environ), accelerator_name() or "")


def own_name(environ: Mapping[str, str]) -> str:
    """The name of this machine as the cluster knows it."""
    return environ.get("NODE_NAME") or environ.get("SLURMD_NODENAME") or socket.gethostname()


def _boot_id() -> str:
    try:
        return BOOT_ID.read_text("ascii").strip()
    except OSError:
        return ""


def gather_identities(group: ProcessGroup | None = None) -> tuple[Identity, ...]:
    """Identities of all ranks, in their order. All ranks of the group must call it; no group is made for it.

    Args:
        group: a process group of torch.distributed, by default all ranks.
    """
    import torch.distributed as dist

    found: list[Identity | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, own_identity(), group=group)
    return tuple(identity for identity in found if identity is not None)


def distributed_is_on() -> bool:
    """Whether torch is loaded and its default process group stands. Doesn't load torch."""
    import sys

    if "torch" not in sys.modules:
        return False
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def accelerator_name() -> str | None:
    """What the driver calls this process's accelerator; None without one. Loads torch where it is installed."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.accelerator.is_available():
        return None
    kind = torch.accelerator.current_accelerator()
    module = torch.get_device_module(kind)
    return str(module.get_device_name()) if hasattr(module, "get_device_name") else str(kind)


def accelerator_count() -> int:
    """Accelerators of this machine that this process sees. Loads torch where it is installed."""
    try:
        import torch
    except ImportError:
        return 0
    return torch.accelerator.device_count()
