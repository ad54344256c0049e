"""Who takes part: a rank's host, process and the address at which others can ask whether its process still exists."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
from dataclasses import dataclass

from laneway.cluster.identity import BOOT_ID, own_name

__all__ = ["Member", "address_towards", "own_machine"]


@dataclass(frozen=True)
class Member:
    """One process of the run.

    Attributes:
        ident: its rank when the watch began; it never changes.
        rank: its rank now.
        host: name of its machine.
        machine: tells machines apart, where names may repeat.
        process: process number on its machine.
        address, port: where its tether listens.
    """

    ident: int
    rank: int
    host: str
    machine: str
    process: int
    address: str
    port: int

    @classmethod
    def own(cls, rank: int, address: str, port: int) -> Member:
        """This process as ``rank``."""
        return cls(rank, rank, own_name(os.environ), own_machine(), os.getpid(), address, port)

    def now(self, rank: int) -> Member:
        """The same process under another rank."""
        return dataclasses.replace(self, rank=rank)

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Member:
        """Undo of ``to_json``."""
        return cls(**json.loads(text))


def own_machine() -> str:
    """Host name and boot id: neither alone tells containers and machines of one name apart."""
    try:
        boot = BOOT_ID.read_text("ascii").strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()}/{boot}"


def address_towards(host: str, port: int) -> str:
    """The address of this machine on the way to ``host``; the loopback address where there is no way."""
    try:
        kind, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing: it only looks up the route
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
