"""Ranks forked from one process that has imported everything already, each in its host's namespace."""

from __future__ import annotations

import importlib
import os
import random
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from laneway.bench.netlab import kernel, wire
from laneway.bench.netlab.context import Context
from laneway.bench.netlab.errors import Ended, LabError
from laneway.bench.netlab.fabric import namespace_of
from laneway.bench.netlab.network import Network, host_name
from laneway.bench.netlab.supervisor import Key, Outcome, Supervisor, log_output, tail

__all__ = ["RanksJob"]

PORT = 29511


@dataclass
class RanksJob:
    """A function on every rank of a network.

    Attributes:
        module, name: where the function is found.
        kwargs: what it is called with, after the context.
        environment, path, folder: of the process that asked.
    """

    network: Network
    module: str
    name: str
    kwargs: dict[str, Any]
    timeout: float
    grace: float
    may_die: Sequence[int]
    environment: dict[str, str]
    path: list[str]
    folder: str
    preload: Sequence[str] = field(default=())

    def __call__(self) -> Outcome:
        """In the first process of new namespaces: the whole lab."""
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.folder)
        sys.path[:] = self.path
        return _Ranks(self).run()


class _Ranks(Supervisor):
    def __init__(self, job: RanksJob) -> None:
        super().__init__(job.network, job.timeout, job.may_die, job.grace)
        self.job, self.body = job, _find(job.module, job.name)
        self._errors: dict[int, tuple[str, str]] = {}

    def begin(self) -> None:
        for rank in range(self.network.world):
            pid = os.fork()
            if pid == 0:
                _be_rank(self.job, rank, self.body)
            self.running[pid] = rank

    def ended(self, key: Key, status: int) -> Ended | None:
        assert isinstance(key, int)
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            return Ended(f"ended by signal {number}", signal=number, output=tail(key))
        if key in self._errors:
            return Ended(*self._errors[key], output=tail(key))
        if key not in self.outcome.values:
            return Ended(f"exit code {os.WEXITSTATUS(status)} without a result", output=tail(key))
        return None

    def pids_of_host(self, rack: int, host: int) -> list[int]:
        return [pid for pid, rank in self.running.items() if self.network.positions[int(rank)] == (rack, host)]

    def _do_failed(self, caller: Any, reason: str, text: str) -> None:
        self._errors[caller.rank] = reason, text


def _find(module: str, name: str) -> Callable[..., Any]:
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise LabError(f"{module}:{name} can't be imported in the lab\n{traceback.format_exc()}") from error
    return found


def _be_rank(job: RanksJob, rank: int, body: Callable[..., Any]) -> NoReturn:
    """Ends without the interpreter's tear-down: a gloo thread that is blocked would never be joined."""
    try:
        log_output(rank)
        place = job.network.positions[rank]
        enter_host(*place)
        os.environ.update(rank_environment(job.network, rank))
        _seed(rank)
        context = Context(wire.SOCKET, rank)
        code = _call(context, body, job.kwargs)
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _call(context: Context, body: Callable[..., Any], kwargs: dict[str, Any]) -> int:
    try:
        context.report(body(context, **kwargs))
    except BaseException as error:  # noqa: BLE001
        context.failed(error)
        return 1
    return 0


def enter_host(rack: int, host: int) -> None:
    """This process belongs to a host from here on: its network, its name."""
    kernel.setns(namespace_of(rack, host), kernel.NEWNET)
    kernel.unshare(kernel.NEWUTS)
    kernel.sethostname(host_name(rack, host))


def rank_environment(network: Network, rank: int) -> dict[str, str]:
    """What torchrun would set, and the interface that gloo is to use."""
    rack, host = network.positions[rank]
    return host_environment() | {
        "RANK": str(rank),
        "WORLD_SIZE": str(network.world),
        "LOCAL_RANK": str(network.local(rank)),
        "LOCAL_WORLD_SIZE": str(network.shape[rack][host]),
        "GROUP_RANK": str(network.hosts.index((rack, host))),
        "MASTER_ADDR": network.address(*network.hosts[0]),
        "MASTER_PORT": str(PORT),
    }


def host_environment() -> dict[str, str]:
    """What every process in a lab has."""
    return {
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "LANEWAY_NETLAB": wire.SOCKET,
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
    }


def _seed(rank: int) -> None:
    """Forked ranks would otherwise draw the same numbers."""
    import numpy as np
    import torch

    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)
