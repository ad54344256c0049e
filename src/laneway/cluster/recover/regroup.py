"""New process groups for those that are left, and the old ones laid to rest.

gloo can't be interrupted: a collective that waits for a lost rank waits on until its timeout, in a thread that is left behind.
So groups that may be in use are neither used nor freed again.
"""

from __future__ import annotations

import ctypes
import os
import sys
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed import distributed_c10d

from laneway.cluster.recover.board import another
from laneway.cluster.recover.watch import Watch

__all__ = ["bury", "leave", "rebuild"]


def bury() -> int:
    """Abort all process groups of this process and forget them without freeing them; returns how many there were.

    NCCL's are aborted, gloo's left as they are: freeing one would wait for what still runs in it.
    """
    if not dist.is_initialized():
        return 0
    groups: list[Any] = list(distributed_c10d._world.pg_map)
    for group in groups:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))  # never freed, also not as the interpreter ends
    distributed_c10d._abort_process_group()
    return len(groups)


def rebuild(
    watch: Watch,
    *,
    backend: str | None = None,
    at_least: int | None = None,
    patience: float = 60.0,
    timeout: timedelta = timedelta(seconds=60),
) -> int:
    """Agree on who is left, lay the old groups to rest and make a new default group; returns how many ranks it has.

    All that are left call it after they were told of a loss. Whatever holds an old group (DDP, meshes, level groups) must be
    made anew after it. Where another rank is lost meanwhile, it raises, and may be called again.

    Args:
        watch: goes on over the new world; its store serves the new group too.
        backend: as for ``init_process_group``; by default the old group's.
        at_least, patience: see ``Watch.next_world``.
        timeout: of the new default group.

    Raises:
        MinorityError: too few are left.
        LostContactError: contact was lost again, or this rank was left out.
    """
    if backend is None:
        backend = str(dist.get_backend_config()) if dist.is_initialized() else "gloo"
    members = watch.next_world(at_least=at_least, patience=patience)
    bury()
    store = dist.PrefixStore(f"group/{watch.generation}", another(watch.store))
    watch.watched(dist.init_process_group, backend, store=store, rank=watch.rank, world_size=len(members), timeout=timeout)
    return len(members)


def leave(code: int) -> NoReturn:
    """End this process at once: threads that are stuck in a collective would keep the interpreter from ending."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
