"""All ranks ask for the same groups, and count them from the same number on, before they make any."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from laneway.cluster.decisions import digest
from laneway.core import LanewayError

__all__ = ["agree_on_groups"]


def agree_on_groups(key: Any, device: torch.device, trouble: str) -> None:
    """One small all-reduce over all ranks; every rank must call it before it makes groups.

    A group's name, by which its members find each other, is the number of groups that the process has made. Where user code
    made a group on some ranks alone, the numbers differ and members would wait for each other for ever (pytorch#173608): all go
    on from the largest.

    Args:
        key: what the groups will be; compared by its `repr`.
        device: where the default group's backend takes tensors from.
        trouble: the error's text where keys differ.

    Raises:
        LanewayError: keys differ between ranks.
    """
    told = digest(repr(key))
    found = torch.tensor([distributed_c10d._world.group_count, told, -told], dtype=torch.int64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    count, most, least = found.tolist()
    if most != -least:
        raise LanewayError(trouble)
    distributed_c10d._world.group_count = count
