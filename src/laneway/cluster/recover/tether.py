"""A listening socket that says one thing: this process exists. The operating system answers for it, also while it is frozen.

A connection that is refused where it was once accepted means that the process is gone: known in a round trip, with no waiting
for a heart-beat to be late.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import selectors
import socket
import time
from collections.abc import Sequence

from laneway.cluster.recover.members import Member

__all__ = ["Prober", "Tether"]

MOST_AT_ONCE = 64


class Tether:
    """Listens on ``address`` at a free port; ``drain`` must be called now and then."""

    def __init__(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        self.socket.bind((address, 0))
        self.socket.listen(512)
        self.socket.setblocking(False)
        self.port: int = self.socket.getsockname()[1]

    def drain(self) -> None:
        """Close the connections that others made to look whether we are here."""
        with contextlib.suppress(OSError):  # none left
            while True:
                self.socket.accept()[0].close()

    def close(self) -> None:
        """Stop listening."""
        self.socket.close()


class Prober:
    """Asks the tethers of other members, and believes a refusal only of one that it reached before.

    An address that leads elsewhere from here (another network's 10.0.0.1, another machine's loopback) would refuse too.
    """

    def __init__(self, machine: str) -> None:
        self.machine = machine
        self.reached: set[int] = set()

    def can_ask(self, member: Member) -> bool:
        """Whether the member's address means that machine from here."""
        return member.machine == self.machine or not ipaddress.ip_address(member.address.split("%")[0]).is_loopback

    def meet(self, members: Sequence[Member], seconds: float) -> None:
        """Try to reach members for the first time."""
        new = [member for member in members if member.ident not in self.reached and self.can_ask(member)]
        self._ask(new[:MOST_AT_ONCE], seconds)

    def gone(self, members: Sequence[Member], seconds: float) -> set[int]:
        """Idents of those whose process surely exists no more; looks for at most ``seconds``."""
        known = [member for member in members if member.ident in self.reached]
        return self._ask(known[:MOST_AT_ONCE], seconds)

    def _ask(self, members: Sequence[Member], seconds: float) -> set[int]:
        refused: set[int] = set()
        with selectors.DefaultSelector() as waiting:
            for member in members:
                asked = socket.socket(socket.AF_INET6 if ":" in member.address else socket.AF_INET, socket.SOCK_STREAM)
                asked.setblocking(False)
                self._answer(member, asked, asked.connect_ex((member.address, member.port)), waiting, refused)
            until = time.monotonic() + seconds
            while waiting.get_map() and (left := until - time.monotonic()) > 0:
                for key, _ in waiting.select(left):
                    waiting.unregister(key.fileobj)
                    asked = key.fileobj
                    assert isinstance(asked, socket.socket)
                    error = asked.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                    self._answer(key.data, asked, error, None, refused)
            for key in list(waiting.get_map().values()):
                assert isinstance(key.fileobj, socket.socket)
                key.fileobj.close()
        return refused

    def _answer(
        self,
        member: Member,
        asked: socket.socket,
        error: int,
        waiting: selectors.BaseSelector | None,
        refused: set[int],
    ) -> None:
        if error == errno.EINPROGRESS and waiting is not None:
            waiting.register(asked, selectors.EVENT_WRITE, member)
            return
        if error == 0:
            self.reached.add(member.ident)
        elif error == errno.ECONNREFUSED:
            refused.add(member.ident)
        asked.close()
