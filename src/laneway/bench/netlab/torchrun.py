"""torchrun in a lab: one agent per host, each with its own network, host name and processes."""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from laneway.bench.netlab import kernel
from laneway.bench.netlab.client import check_seconds, lab_environment, make
from laneway.bench.netlab.errors import Ended, RankFailed, TimeLimit
from laneway.bench.netlab.network import Network, host_name
from laneway.bench.netlab.ranks import PORT, enter_host, host_environment
from laneway.bench.netlab.supervisor import Key, Outcome, Supervisor, log_output, tail
from laneway.core import InputError, choice

__all__ = ["RENDEZVOUS", "TorchrunResult", "run_torchrun"]

RENDEZVOUS = ("static", "c10d")
MONITOR_S = "0.1"


@dataclass(frozen=True)
class TorchrunResult:
    """What torchrun's agents did.

    Attributes:
        codes: exit code by host name; negative: the signal that ended it.
        output: end of what agent and workers wrote, by host name.
        reports: what workers gave to ``Context.attach().report``, by rank.
        ended: hosts in ``may_die`` that were killed.
    """

    codes: dict[str, int]
    output: dict[str, str]
    reports: dict[int, Any]
    ended: dict[str, Ended]


@dataclass
class TorchrunJob:
    """The command after torchrun's own options, on every host of a network."""

    network: Network
    command: tuple[str, ...]
    rendezvous: str
    options: tuple[str, ...]
    timeout: float
    grace: float
    may_die: tuple[str, ...]
    environment: dict[str, str]
    folder: str
    preload: tuple[str, ...] = ("torch.distributed.run",)

    def __call__(self) -> Outcome:
        """In the first process of new namespaces: the whole lab."""
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.folder)
        return _Agents(self).run()


class _Agents(Supervisor):
    def __init__(self, job: TorchrunJob) -> None:
        super().__init__(job.network, job.timeout, job.may_die, job.grace)
        self.job = job

    def begin(self) -> None:
        for rack, host in self.network.hosts:
            self._start(rack, host)

    def _start(self, rack: int, host: int) -> None:
        pid = os.fork()
        if pid == 0:
            _be_agent(self.job, rack, host)
        self.running[pid] = host_name(rack, host)

    def start_host(self, rack: int, host: int) -> None:
        if (rack, host) not in self.network.hosts or self.pids_of_host(rack, host):
            raise InputError("host", (rack, host), "one whose agent has ended")
        self.outcome.ended.pop(host_name(rack, host), None)
        self._start(rack, host)

    def ended(self, key: Key, status: int) -> Ended | None:
        name = str(key)
        code = os.waitstatus_to_exitcode(status)
        self.outcome.codes[name], self.outcome.output[name] = code, tail(name)
        if code == 0:
            return None
        reason = f"ended by signal {-code}" if code < 0 else f"exit code {code}"
        return Ended(reason, signal=max(-code, 0), output=tail(name))

    def pids_of_host(self, rack: int, host: int) -> list[int]:
        return [pid for pid, name in self.running.items() if name == host_name(rack, host)]


def _be_agent(job: TorchrunJob, rack: int, host: int) -> NoReturn:
    """Holds the host's first process, and ends as that ends: a signal for this one kills all that runs on the host."""
    try:
        log_output(host_name(rack, host))
        enter_host(rack, host)
        kernel.unshare(kernel.NEWPID)
        inner = os.fork()
        if inner == 0:
            kernel.die_with_parent()
            os.environ.update(host_environment())
            os._exit(_torchrun([*_options(job, rack, host), *job.command]))
        code = os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1])
    except BaseException as error:  # noqa: BLE001
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        code = 1
    os._exit(code if code >= 0 else 128 - code)


def _torchrun(arguments: list[str]) -> int:
    """What the command torchrun does, without importing torch anew."""
    from torch.distributed.run import main

    sys.argv = ["torchrun", *arguments]
    try:
        main(arguments)
    except SystemExit as end:
        return (end.code or 0) if isinstance(end.code, int | None) else 1
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _options(job: TorchrunJob, rack: int, host: int) -> list[str]:
    network = job.network
    first = network.address(*network.hosts[0])
    common = ["--nproc-per-node", str(network.shape[rack][host]), "--monitor-interval", MONITOR_S]
    if job.rendezvous == "static":
        place = str(network.hosts.index((rack, host)))
        own = ["--nnodes", str(len(network.hosts)), "--node-rank", place, "--master-addr", first, "--master-port", str(PORT)]
    else:
        own = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first}:{PORT}", "--rdzv-id", "lab"]
        own += ["--local-addr", network.address(rack, host)]
        if "--nnodes" not in job.options:
            own += ["--nnodes", str(len(network.hosts))]
    return [*common, *own, *job.options]


def run_torchrun(
    command: Sequence[str],
    network: Network | None = None,
    *,
    rendezvous: str = "static",
    options: Sequence[str] = (),
    timeout: float = 120.0,
    grace: float = 5.0,
    may_die: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> TorchrunResult:
    """One torchrun agent on every host of a fresh network; each starts as many workers as the host has ranks.

    A worker gets its `Context` from ``Context.attach()``, if it wants to report, count or break something. Hosts have numbers in
    the order of `Network.hosts` with the static rendezvous only: c10d gives them as it likes, and then a context's positions
    are not where the ranks are.

    Args:
        command: script and arguments, or "-m", module, ….
        network: two racks of two hosts with two ranks each by default.
        rendezvous: static or c10d; the first host holds the store.
        options: further options of torchrun ("--max-restarts", "2").
        timeout: seconds until everything is killed.
        grace: seconds that the other hosts have once one has failed.
        may_die: names of hosts (``host_name``) that may be killed.
        environment: variables of the agents and workers, beside this process's.

    Raises:
        Unavailable, RankFailed, TimeLimit, LabError, InputError: as `run`.
    """
    network = Network() if network is None else network
    choice("rendezvous", rendezvous, RENDEZVOUS)
    check_seconds("timeout", timeout)
    check_seconds("grace", grace)
    names = [host_name(*place) for place in network.hosts]
    for name in may_die:
        choice("may_die", name, names)
    if isinstance(command, str) or not command:
        raise InputError("command", command, "a script and its arguments, one string each")
    job = TorchrunJob(
        network,
        tuple(command),
        rendezvous,
        tuple(options),
        timeout,
        grace,
        tuple(may_die),
        lab_environment(environment),
        os.getcwd(),
    )
    outcome = make(job, timeout + grace)
    failures = {name: found for name, found in outcome.ended.items() if not (name in may_die and found.signal)}
    reports = {rank: pickle.loads(value) for rank, value in sorted(outcome.values.items())}
    if failures or outcome.timed_out:
        raise (TimeLimit if outcome.timed_out else RankFailed)(dict(sorted(failures.items())), reports)
    return TorchrunResult(outcome.codes, outcome.output, reports, outcome.ended)
