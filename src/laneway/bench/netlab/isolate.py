"""A function as the first process of namespaces of its own: when it ends, the kernel ends and frees all that was made inside.

    caller ── outer (waits; enters the namespaces) ── inner (pid 1 inside; runs the function)

Each dies with the one before it, also by SIGKILL. Processes and network devices of the inner one can't outlive it.
"""

from __future__ import annotations

import os
import pickle
import select
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from laneway.bench.netlab import kernel
from laneway.bench.netlab.errors import LabError
from laneway.core import LanewayError

__all__ = ["isolated", "unpack"]

FLAGS = kernel.NEWNET | kernel.NEWNS | kernel.NEWUTS | kernel.NEWPID
CHUNK = 1 << 20


def isolated(work: Callable[[], Any], *, user: bool) -> bytes:
    """Run ``work`` in new network, mount, UTS and process namespaces, and with ``user`` in a user namespace, as root of it.

    Returns:
        What `unpack` wants; empty where the processes were killed.
    """
    read, write = os.pipe()
    caller = os.getpid()
    outer = os.fork()
    if outer == 0:
        os.close(read)
        _outer(work, user, caller, write)
    os.close(write)
    parts = []
    with os.fdopen(read, "rb", buffering=0) as pipe:
        while part := pipe.read(CHUNK):
            parts.append(part)
    os.waitpid(outer, 0)
    return b"".join(parts)


def unpack(answer: bytes) -> Any:
    """The result of the function, or its error raised anew.

    Raises:
        LabError: it was killed, or raised what is no LanewayError; then with the traceback.
    """
    if not answer:
        raise LabError("the network lab's first process was killed")
    fine, value = pickle.loads(answer)
    if not fine:
        raise value
    return value


def _outer(work: Callable[[], Any], user: bool, caller: int, write: int) -> NoReturn:
    try:
        kernel.unshare(FLAGS | (kernel.NEWUSER if user else 0))
        kernel.die_with_parent()
        if os.getppid() != caller:
            os._exit(1)
        alive, held = os.pipe()
        inner = os.fork()
        if inner == 0:
            os.close(held)
            _inner(work, alive, write)
        os.close(write)
        os.waitpid(inner, 0)
    except BaseException as error:  # noqa: BLE001
        _answer(write, False, error)
    os._exit(0)


def _inner(work: Callable[[], Any], alive: int, write: int) -> NoReturn:
    kernel.die_with_parent()
    if select.select([alive], [], [], 0)[0]:  # the outer process ended before the call
        os._exit(1)
    try:
        _answer(write, True, work())
    except BaseException as error:  # noqa: BLE001
        _answer(write, False, error)
    os._exit(0)


def _answer(write: int, fine: bool, value: Any) -> None:
    if isinstance(value, BaseException) and not isinstance(value, LanewayError | OSError):
        value = LabError("".join(traceback.format_exception(value)).rstrip())
    sys.stdout.flush()
    sys.stderr.flush()
    view = memoryview(pickle.dumps((fine, value)))
    while view:
        view = view[os.write(write, view) :]
