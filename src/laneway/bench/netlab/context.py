"""What a rank in a lab knows and can do: meet the others outside of the network, time and count, change the network, kill."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from laneway.bench.netlab import wire
from laneway.bench.netlab.errors import LabError
from laneway.bench.netlab.network import Network
from laneway.core import InputError

__all__ = ["Context", "Timed"]

LEAD_S = 0.012
"""From the agreement on a common start to the start."""
SETTLE_S = 0.004
"""Acknowledgements that are still on their way."""
SPIN_S = 0.0003
STACKS: int = getattr(signal, "SIGUSR1", 0)  # systems without it have no lab, but import this
"""Makes a rank write the stacks of its threads to stderr."""


@dataclass(frozen=True)
class Timed:
    """One call on all ranks.

    Attributes:
        seconds: from the common start to the end of the last rank.
        nbytes: bytes that passed each direction of each link meanwhile, with headers.
        value: what the call returned on this rank.
    """

    seconds: float
    nbytes: dict[str, int]
    value: Any = None


class Context:
    """A rank's view of its lab. Its coordination puts no byte on the links.

    Attributes:
        network: the lab's network.
        rank, world: of this process, in the job.
        rack, host, local: where it lives.
        positions: (rack, host) of every rank.
    """

    def __init__(self, path: str, rank: int) -> None:
        faulthandler.register(STACKS, file=2, all_threads=True)
        self.rank = rank
        self._sync, self._control = _Channel(path, rank, "sync"), _Channel(path, rank, "control")
        self.network: Network = self._control.ask("network")
        self.world, self.positions = self.network.world, self.network.positions
        self.rack, self.host = self.positions[rank]
        self.local = self.network.local(rank)

    @classmethod
    def attach(cls) -> Context:
        """In a worker that torchrun started inside a lab (`run_torchrun`).

        Raises:
            LabError: this process is in no lab.
        """
        path = os.environ.get("LANEWAY_NETLAB")
        if not path:
            raise LabError("this process is in no network lab: LANEWAY_NETLAB is not set")
        return cls(path, int(os.environ["RANK"]))

    def start_gloo(self, seconds: float = 60.0) -> None:
        """``init_process_group`` with gloo; ``seconds`` is the time limit of its collectives."""
        import torch.distributed as dist

        dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))

    def gather(self, value: Any = None, *, ranks: Sequence[int] | None = None, timeout: float = 60.0) -> list[Any]:
        """Every rank's ``value``, in the order of ``ranks`` (all by default), once all of them have called.

        Raises:
            LabError: one of them has ended, or they did not come within ``timeout`` seconds.
        """
        return self._meet(value, ranks, timeout)[0]

    def barrier(self, *, ranks: Sequence[int] | None = None, timeout: float = 60.0) -> None:
        """Wait until all ``ranks`` (all by default) are here; errors as `gather`."""
        self._meet(None, ranks, timeout)

    def _meet(self, value: Any, ranks: Sequence[int] | None, timeout: float) -> tuple[list[Any], float]:
        who = tuple(range(self.world)) if ranks is None else tuple(ranks)
        if self.rank not in who:
            raise InputError("ranks", list(who), f"ranks with the caller, {self.rank}, among them")
        return self._sync.ask("meet", who, value, timeout=timeout)

    def start(self, *, ranks: Sequence[int] | None = None) -> float:
        """Return on all ``ranks`` at the same instant: its time.monotonic(), which is the same clock on all."""
        begin = self._meet(None, ranks, 60.0)[1] + LEAD_S
        while (left := begin - time.monotonic()) > 0:
            time.sleep(max(left - SPIN_S, 0))
        return begin

    def timed(self, call: Callable[[], Any], *, ranks: Sequence[int] | None = None) -> Timed:
        """Call at the same instant on all ``ranks``, and count what passes the links until the last is done.

        Connections that gloo opens on first use, and their bytes, are in it: call once before.
        """
        self.barrier(ranks=ranks)
        time.sleep(SETTLE_S)
        before = self.counters()
        begin = self.start(ranks=ranks)
        value = call()
        ends = self.gather(time.monotonic(), ranks=ranks)
        time.sleep(SETTLE_S)
        after = self.counters()
        counts = self.gather((before, after), ranks=ranks)[0]
        return Timed(max(ends) - begin, {link: counts[1][link] - counts[0][link] for link in after}, value)

    def counters(self) -> dict[str, int]:
        """Bytes that have passed each direction of each link so far."""
        return self._control.ask("counters")

    def set_rate(self, link: str, mbit: float) -> float:
        """Another rate for a link or one direction of it, now, while traffic flows (``tc qdisc change``).

        Returns:
            time.monotonic() when it was done.
        """
        return self._control.ask("set_rate", link, mbit)

    def set_link(self, link: str, up: bool) -> float:
        """Cut a link, or join it again: packets vanish, nobody is told. Returns when it was done."""
        return self._control.ask("set_link", link, up)

    def kill(self, *ranks: int) -> float:
        """SIGKILL; name them in ``may_die``. Returns when it was done."""
        return self._control.ask("signal", ranks, int(signal.SIGKILL))

    def stop(self, *ranks: int) -> float:
        """SIGSTOP: as a host that hangs; sockets stay open. Returns when it was done."""
        return self._control.ask("signal", ranks, int(signal.SIGSTOP))

    def resume(self, *ranks: int) -> float:
        """SIGCONT. Returns when it was done."""
        return self._control.ask("signal", ranks, int(signal.SIGCONT))

    def kill_host(self, rack: int, host: int) -> float:
        """SIGKILL for all that runs on a host, under torchrun its agent too. Returns when it was done."""
        return self._control.ask("signal_host", rack, host, int(signal.SIGKILL))

    def stop_host(self, rack: int, host: int) -> float:
        """SIGSTOP for all that runs on a host. Returns when it was done."""
        return self._control.ask("signal_host", rack, host, int(signal.SIGSTOP))

    def resume_host(self, rack: int, host: int) -> float:
        """SIGCONT for all that runs on a host. Returns when it was done."""
        return self._control.ask("signal_host", rack, host, int(signal.SIGCONT))

    def start_host(self, rack: int, host: int) -> float:
        """Under torchrun: a new agent on a host whose agent has ended. Returns when it was started."""
        return self._control.ask("start_host", rack, host)

    def report(self, value: Any) -> None:
        """Under torchrun: this rank's result, for whoever called `run_torchrun`; the last one counts."""
        self._control.ask("report", wire.packed(value))

    def failed(self, error: BaseException) -> None:
        """This rank ends with ``error``."""
        text = "".join(traceback.format_exception(error))
        self._control.ask("failed", "".join(traceback.format_exception_only(error)).strip().splitlines()[0], text)


class _Channel:
    """Questions and answers, one at a time; each thread of a rank may ask."""

    def __init__(self, path: str, rank: int, kind: str) -> None:
        self._connection, self._lock = wire.connect(path), threading.Lock()
        self.ask("hello", rank, kind)

    def ask(self, name: str, *arguments: Any, timeout: float = 30.0) -> Any:
        with self._lock:
            wire.send(self._connection, (name, arguments))
            if not self._connection.poll(timeout):
                raise LabError(f"network lab: no answer to {name!r} within {timeout:g} s")
            fine, value = wire.receive(self._connection)
        if not fine:
            raise value
        return value
