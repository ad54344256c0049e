"""A store for one start of a run's processes. torchrun's agent keeps its store when it starts the processes anew.

What the dead ones left there, such as the addresses at which gloo would reach them, must not be read by their successors
(``Gloo connectFullMesh failed … Connection refused``). No environment variable tells starts apart on all hosts: agents count
restarts each for itself. So the processes of one start find each other by names they have just made up.
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from laneway.core import LanewayError

__all__ = ["agree_on_name", "attempt_store"]

START = timedelta(minutes=10)
"""Processes of one start come up to minutes apart: hosts notice a failure one after the other, and torch takes time to load."""


def attempt_store(rank: int, size: int, timeout: timedelta = START) -> dist.Store | None:
    """A store for ``init_process_group(store=…)`` in which nothing is left of former starts; None where torch needs no other.

    Args:
        rank, size: this process among those that torchrun started.
        timeout: for all of them to come.

    Raises:
        LanewayError: some did not come.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":  # rank 0 serves a store of its own, new with each start
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, None, False, timeout, wait_for_workers=False)
    return dist.PrefixStore(f"laneway/{agree_on_name(dist.PrefixStore('laneway', store), rank, size, timeout)}", store)


def agree_on_name(store: dist.Store, rank: int, size: int, timeout: timedelta) -> str:
    """A name that the present ``size`` processes have in common, and no former ones, whatever these left in ``store``.

    Each shows a name of its own under its rank; rank 0 answers under that name. A name that a former process left is answered
    too, but nobody reads it: rank 0 goes on until each rank has thanked for this answer.

    Raises:
        LanewayError: not all came within ``timeout``.
    """
    own = uuid.uuid4().hex
    if rank == 0:
        _invite(store, own, size, time.monotonic() + timeout.total_seconds())
        return own
    store.set(f"hello/{rank}", own)
    try:
        store.wait([f"welcome/{own}"], timeout)
    except RuntimeError as error:
        raise LanewayError(f"rank {rank} of {size}: rank 0 did not answer within {timeout.total_seconds():g} s") from error
    name = store.get(f"welcome/{own}").decode()
    store.set(f"thanks/{name}/{rank}", "1")
    return name


def _invite(store: dist.Store, name: str, size: int, until: float) -> None:
    answered: dict[int, bytes] = {}
    missing = set(range(1, size))
    while missing:
        for rank in missing:
            if not store.check([f"hello/{rank}"]):
                continue
            asked = store.get(f"hello/{rank}")
            if answered.get(rank) != asked:
                store.set(f"welcome/{asked.decode()}", name)
                answered[rank] = asked
        missing = {rank for rank in missing if not store.check([f"thanks/{name}/{rank}"])}
        if missing and time.monotonic() > until:
            raise LanewayError(f"ranks have not come: {', '.join(map(str, sorted(missing)))} of {size}")
        time.sleep(0.01)
