"""The process that imports torch once; labs are forked from it. ``python -m laneway.bench.netlab.zygote SOCKET PARENT``."""

from __future__ import annotations

import importlib
import os
import sys
from multiprocessing.connection import Connection
from typing import Any

from laneway.bench.netlab import kernel, wire
from laneway.bench.netlab.errors import LabError
from laneway.bench.netlab.fabric import Fabric
from laneway.bench.netlab.isolate import isolated, unpack
from laneway.bench.netlab.network import Network
from laneway.core import LanewayError

PRELOAD = ("numpy", "torch", "torch.distributed")


def main(connection: Connection, parent: int) -> None:
    """Say whether labs can be made here, then make one after the other until the parent is gone."""
    kernel.die_with_parent()
    if os.getppid() != parent:
        return
    user, why = possible()
    wire.send(connection, why)
    if why:
        return
    _import(PRELOAD)
    while True:
        try:
            job: Any = wire.receive(connection)
        except EOFError:
            return
        _import(job.preload)
        connection.send_bytes(isolated(job, user=user))


def possible() -> tuple[bool, str]:
    """Whether a user namespace is needed, and where no lab can be made the reason, one line; "" otherwise."""
    said = []
    for user in (False, True) if os.geteuid() == 0 else (True,):
        try:
            unpack(isolated(_smallest, user=user))
        except (LanewayError, OSError) as error:
            said.append(("in a user namespace: " if user else "as root: ") + _last_line(error))
        else:
            return user, ""
    wanted = "the network lab needs Linux with CAP_SYS_ADMIN and CAP_NET_ADMIN or user namespaces, and ip and tc of iproute2"
    return False, f"{wanted}; " + "; ".join(said)


def _smallest() -> None:
    fabric = Fabric(Network(((1,),)))
    fabric.build()
    fabric.set_rate("rack0", 1)


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1] if isinstance(error, LabError) else lines[0]


def _import(names: tuple[str, ...]) -> None:
    for name in names:
        importlib.import_module(name)
    if "torch" in names:
        sys.modules["torch"].set_num_threads(1)


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])), int(sys.argv[2]))
