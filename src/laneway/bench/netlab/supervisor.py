"""The lab's first process: builds the network, starts what runs in it, answers ranks, ends everything in time."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from laneway.bench.netlab import wire
from laneway.bench.netlab.context import STACKS
from laneway.bench.netlab.errors import Ended, LabError
from laneway.bench.netlab.fabric import Fabric
from laneway.bench.netlab.network import Network
from laneway.core import InputError, LanewayError

__all__ = ["Outcome", "Supervisor"]

POLL_S = 0.02
STACKS_S = 0.3
TAIL = 6000
Key = int | str


@dataclass
class Outcome:
    """What became of a lab; values are packed, as the ranks sent them."""

    values: dict[int, bytes] = field(default_factory=dict)
    ended: dict[Any, Ended] = field(default_factory=dict)
    codes: dict[str, int] = field(default_factory=dict)
    output: dict[str, str] = field(default_factory=dict)
    timed_out: bool = False


@dataclass
class _Caller:
    connection: Connection
    pid: int
    rank: int = -1
    kind: str = ""


class Supervisor(ABC):
    """The part that is the same whether the lab holds forked ranks or torchrun's agents.

    Args:
        network: what to build.
        timeout: seconds from the start of the ranks.
        may_die: ranks (or hosts) whose end by a signal is no failure.
        grace: seconds that the others have after a failure.
    """

    def __init__(self, network: Network, timeout: float, may_die: Sequence[Key], grace: float) -> None:
        self.network, self.timeout, self.may_die, self.grace = network, timeout, set(may_die), grace
        self.fabric = Fabric(network)
        self.outcome = Outcome()
        self.running: dict[int, Key] = {}
        self._callers: list[_Caller] = []
        self._meetings: dict[tuple[int, ...], dict[int, tuple[_Caller, Any]]] = {}
        self._gone: set[int] = set()
        self._failed: tuple[float, Key] | None = None

    def run(self) -> Outcome:
        """From the building of the network to the end of the last rank."""
        self.fabric.build()
        server = wire.listen()
        self.begin()
        deadline = time.monotonic() + self.timeout
        while self.running:
            self._serve(server)
            self._reap()
            now = time.monotonic()
            if set(self.running.values()) <= self.may_die:
                self._end_rest("was still running when all others were done")
            elif self._failed and now > self._failed[0] + self.grace:
                self._end_rest(f"was still running {self.grace:g} s after {self._failed[1]} failed")
            elif now > deadline:
                self.outcome.timed_out = True
                self._end_rest(f"did not end within {self.timeout:g} s")
        return self.outcome

    @abstractmethod
    def begin(self) -> None:
        """Start the processes, and note them in ``running``."""

    @abstractmethod
    def ended(self, key: Key, status: int) -> Ended | None:
        """What to note of a process that ended with this wait status; None where all is well."""

    @abstractmethod
    def pids_of_host(self, rack: int, host: int) -> list[int]:
        """Processes that make up a host."""

    def start_host(self, rack: int, host: int) -> None:
        """A new agent."""
        raise InputError("start_host", (rack, host), "a lab that runs torchrun")

    def _serve(self, server: socket.socket) -> None:
        by_connection = {caller.connection: caller for caller in self._callers}
        for ready in wait([server, *by_connection], POLL_S):
            if ready is server:
                self._callers.append(_accepted(server))
                continue
            caller = by_connection[ready]  # pyrefly: ignore[bad-index]
            try:
                name, arguments = wire.receive(caller.connection)
            except EOFError:
                self._leave(caller)
                continue
            self._answer(caller, name, arguments)

    def _answer(self, caller: _Caller, name: str, arguments: tuple[Any, ...]) -> None:
        if name == "meet":
            self._meet(caller, *arguments)
            return
        try:
            value = getattr(self, f"_do_{name}")(caller, *arguments)
        except (LanewayError, OSError) as error:
            self._reply(caller, False, error)
        else:
            self._reply(caller, True, time.monotonic() if value is None else value)

    def _reply(self, caller: _Caller, fine: bool, value: Any) -> None:
        try:
            wire.send(caller.connection, (fine, value))
        except OSError:
            self._leave(caller)

    def _leave(self, caller: _Caller) -> None:
        if caller in self._callers:
            self._callers.remove(caller)
            caller.connection.close()
        if caller.kind == "sync":
            self._is_gone(caller.rank)

    def _meet(self, caller: _Caller, ranks: tuple[int, ...], value: Any) -> None:
        here = self._meetings.setdefault(ranks, {})
        here[caller.rank] = (caller, value)
        if set(ranks) & self._gone:
            self._fail_meeting(ranks)
        elif len(here) == len(ranks):
            del self._meetings[ranks]
            answer = ([here[rank][1] for rank in ranks], time.monotonic())
            for one, _ in here.values():
                self._reply(one, True, answer)

    def _is_gone(self, rank: int) -> None:
        self._gone.add(rank)
        for ranks in [ranks for ranks in self._meetings if rank in ranks]:
            self._fail_meeting(ranks)

    def _fail_meeting(self, ranks: tuple[int, ...]) -> None:
        gone = sorted(set(ranks) & self._gone)
        for one, _ in self._meetings.pop(ranks, {}).values():
            self._reply(one, False, LabError(f"ranks {gone} have ended and will not come"))

    def _do_hello(self, caller: _Caller, rank: int, kind: str) -> None:
        caller.rank, caller.kind = rank, kind
        if kind == "sync":
            self._gone.discard(rank)

    def _do_network(self, caller: _Caller) -> Network:
        return self.network

    def _do_counters(self, caller: _Caller) -> dict[str, int]:
        return self.fabric.counters()

    def _do_set_rate(self, caller: _Caller, link: str, mbit: float) -> None:
        self.fabric.set_rate(link, mbit)

    def _do_set_link(self, caller: _Caller, link: str, up: bool) -> None:
        self.fabric.set_link(link, up)

    def _do_signal(self, caller: _Caller, ranks: Sequence[int], number: int) -> None:
        known = {one.rank: one.pid for one in self._callers if one.kind == "sync"}
        known |= {rank: pid for pid, rank in self.running.items() if isinstance(rank, int)}
        for rank in ranks:
            if rank not in known:
                raise InputError("rank", rank, f"one that runs: {sorted(known)}")
        for rank in ranks:
            _signal(known[rank], number)

    def _do_signal_host(self, caller: _Caller, rack: int, host: int, number: int) -> None:
        if (rack, host) not in self.network.hosts:
            raise InputError("host", (rack, host), f"one of {list(self.network.hosts)}")
        workers = [one.pid for one in self._callers if one.kind == "sync" and self.network.positions[one.rank] == (rack, host)]
        for pid in dict.fromkeys([*self.pids_of_host(rack, host), *workers]):
            _signal(pid, number)

    def _do_start_host(self, caller: _Caller, rack: int, host: int) -> None:
        self.start_host(rack, host)

    def _do_report(self, caller: _Caller, value: bytes) -> None:
        self.outcome.values[caller.rank] = value

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self.running:
                key = self.running.pop(pid)
                if isinstance(key, int):
                    self._is_gone(key)
                self._note(key, self.ended(key, status))

    def _note(self, key: Key, found: Ended | None) -> None:
        if found is None:
            return
        self.outcome.ended[key] = found
        if self._failed is None and not (key in self.may_die and found.signal):
            self._failed = time.monotonic(), key

    def _end_rest(self, why: str) -> None:
        for caller in self._callers:
            if caller.kind == "sync":
                _signal(caller.pid, STACKS)
        time.sleep(STACKS_S)
        for pid, key in self.running.items():
            _signal(pid, signal.SIGKILL)
            self.outcome.ended[key] = Ended(why, signal=int(signal.SIGKILL), output=tail(key))
        self.running.clear()


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def log_path(key: Key) -> Path:
    """Where a rank's or host's output goes."""
    return Path(f"/run/{key}.log")


def tail(key: Key) -> str:
    """The end of its output."""
    path = log_path(key)
    return path.read_text("utf-8", "replace")[-TAIL:] if path.exists() else ""


def log_output(key: Key) -> None:
    """This process writes to its log from here on."""
    file = os.open(log_path(key), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for number in (1, 2):
        os.dup2(file, number)
    os.close(file)


def _accepted(server: socket.socket) -> _Caller:
    """The other end's process is named by the kernel, in the numbers of this process namespace."""
    client, _ = server.accept()
    pid = int.from_bytes(client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4], "little")
    return _Caller(Connection(client.detach()), pid)
