"""Starts labs from the process that wants them, and never waits for one without a limit."""

from __future__ import annotations

import atexit
import math
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from laneway.bench.netlab import wire
from laneway.bench.netlab.errors import LabError, RankFailed, TimeLimit, Unavailable
from laneway.bench.netlab.isolate import unpack
from laneway.bench.netlab.network import Network
from laneway.bench.netlab.ranks import RanksJob
from laneway.bench.netlab.supervisor import Outcome
from laneway.core import InputError

__all__ = ["available", "run", "shutdown"]

START_S, SETUP_S = 60.0, 30.0
"""Limits on the start of the process that forks labs (it imports torch), and on what a lab does beside its ranks' work."""
_mine = threading.local()
_all: list[_Zygote] = []


class _Zygote:
    """The process that has imported torch. It dies with the thread that started it, so each thread has its own."""

    def __init__(self) -> None:
        if not sys.platform.startswith("linux"):
            raise Unavailable(f"the network lab needs Linux; this is {sys.platform}")
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "laneway.bench.netlab.zygote", str(theirs.fileno()), str(os.getpid())]
            threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
            self.process = subprocess.Popen(
                command,
                env={**os.environ, **threads, "PYTHONPATH": os.pathsep.join(_path())},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self.connection = Connection(ours.detach())
        self.owner = os.getpid()
        _all.append(self)
        why = self.answer(START_S, pickle.loads)
        if why:
            self.close()
            raise Unavailable(why)

    def answer(self, seconds: float, unpacked: Callable[[bytes], Any]) -> Any:
        """The next answer; ends the process where none comes in time, and with it the lab."""
        try:
            if not self.connection.poll(seconds):
                raise LabError(f"the network lab did not answer within {seconds:g} s")
            raw = self.connection.recv_bytes()
        except (EOFError, ConnectionError):
            self.close()
            raise LabError(f"the network lab's process ended with code {self.process.returncode}") from None
        except BaseException:
            self.close()
            raise
        return unpacked(raw)

    def close(self) -> None:
        """Kill it; the kernel ends all labs and everything in them."""
        if self in _all:
            _all.remove(self)
            self.connection.close()
            self.process.kill()
            self.process.wait()


def _zygote() -> _Zygote:
    found = getattr(_mine, "zygote", None)
    if found is None or found.owner != os.getpid() or found not in _all or found.process.poll() is not None:
        _mine.zygote = found = _Zygote()
    return found


def available() -> None:
    """Return where labs can be made.

    Raises:
        Unavailable: with one line that says what is missing.
    """
    _zygote()


def shutdown() -> None:
    """End the process that labs are forked from; the next `run` starts another."""
    for zygote in [one for one in _all if one.owner == os.getpid()]:
        zygote.close()


atexit.register(shutdown)


def run(
    body: Callable[..., Any] | str,
    network: Network | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    timeout: float = 60.0,
    grace: float = 2.0,
    may_die: Sequence[int] = (),
    environment: Mapping[str, str] | None = None,
    preload: Sequence[str] = (),
) -> list[Any]:
    """Call ``body(context, **kwargs)`` on every rank of a fresh network, and return the results in the order of ranks.

    Args:
        body: a function at the top of a module that can be imported, or "module:function". The module is imported anew for every
            lab: it should import only what ranks need.
        network: two racks of two hosts with two ranks each by default.
        kwargs: further arguments, and what the body returns, must be picklable.
        timeout: seconds from the start of the ranks until everything is killed.
        grace: seconds that the other ranks have to end by themselves once one has failed.
        may_die: ranks that may end by a signal; their result is then an `Ended`. When only they still run, the lab ends.
        environment: variables of the ranks, beside this process's.
        preload: modules that take long to import (``torch._dynamo`` for DDP): imported once for all labs of this process.

    Raises:
        Unavailable: no lab can be made on this machine.
        RankFailed: a rank raised or died; with every rank's traceback and output.
        TimeLimit: ranks were still running; with the stacks of their threads.
        LabError: the lab itself failed.
        InputError: a bad argument.
    """
    network = Network() if network is None else network
    module, name = _named(body)
    check_seconds("timeout", timeout)
    check_seconds("grace", grace)
    for rank in may_die:
        if rank not in range(network.world):
            raise InputError("may_die", list(may_die), f"ranks from 0 to {network.world - 1}")
    job = RanksJob(
        network,
        module,
        name,
        dict(kwargs or {}),
        timeout,
        grace,
        tuple(may_die),
        lab_environment(environment),
        _path(),
        os.getcwd(),
        tuple(preload),
    )
    outcome = make(job, timeout + grace)
    values: dict[int, Any] = {rank: pickle.loads(value) for rank, value in outcome.values.items() if rank not in outcome.ended}
    failures = {rank: found for rank, found in outcome.ended.items() if not (rank in may_die and found.signal)}
    if failures or outcome.timed_out:
        raise (TimeLimit if outcome.timed_out else RankFailed)(dict(sorted(failures.items())), values)
    return [values.get(rank, outcome.ended.get(rank)) for rank in range(network.world)]


def make(job: Any, seconds: float) -> Outcome:
    """Run a job in a lab of its own, for at most ``seconds`` and what the lab needs beside."""
    zygote = _zygote()
    wire.send(zygote.connection, job)
    return zygote.answer(seconds + SETUP_S, unpack)


def lab_environment(further: Mapping[str, str] | None) -> dict[str, str]:
    """Variables of this process and ``further`` ones; Python finds in the lab what it finds here."""
    return {**os.environ, **(further or {}), "PYTHONPATH": os.pathsep.join(_path())}


def check_seconds(name: str, value: object) -> None:
    """Raise InputError where ``value`` is no time."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise InputError(name, value, "a number of seconds ≥ 0")


def _path() -> list[str]:
    source = str(Path(__file__).resolve().parents[3])
    return list(dict.fromkeys([source, *(str(Path(part or ".").resolve()) for part in sys.path)]))


def _named(body: Callable[..., Any] | str) -> tuple[str, str]:
    accepted = "a function at the top of a module that can be imported, or 'module:function'"
    if isinstance(body, str):
        module, colon, name = body.partition(":")
        if not (module and colon and name):
            raise InputError("body", body, accepted)
        return module, name
    module, name = getattr(body, "__module__", ""), getattr(body, "__qualname__", "<>")
    if not callable(body) or not module or module == "__main__" or "<" in name:
        raise InputError("body", f"{module}:{name}", accepted)
    return module, name
