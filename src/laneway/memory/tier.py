"""What every tier of memory can do: keep bytes in slots, and copy a storage out to a slot or back in while the caller goes on.

A tier never calls back on its own: a transfer's end is noticed in ``poll`` or ``wait``, on the caller's thread, so that whoever
keeps the books has one thread to think of.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from laneway.core import LanewayError

if TYPE_CHECKING:
    import torch

Ended = Callable[[BaseException | None], None]
"""Called once when a transfer has ended, with what went wrong or None; not called for a cancelled one."""


class TierFullError(LanewayError):
    """The tier has no room for what was asked."""


@dataclass(frozen=True)
class Slot:
    """Room in a tier. ``offset``: where it begins (bytes), or a serial number where the tier has no addresses."""

    offset: int
    nbytes: int


@dataclass
class Traffic:
    """What a tier has moved so far: bytes and transfers each way."""

    bytes_written: int = 0
    bytes_read: int = 0
    writes: int = 0
    reads: int = 0


class Transfer(ABC):
    """A copy that is queued, under way or done."""

    nbytes: int

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether its end was noticed (by ``Tier.poll`` or ``wait``)."""

    @abstractmethod
    def wait(self) -> float:
        """Block until it has ended and its ``Ended`` was called; returns the seconds that took, on the tier's clock.

        A queued transfer that is waited for goes ahead of those that nobody waits for.

        Raises:
            LanewayError: it was cancelled.
            Exception: what ``Ended`` was called with.
        """

    @abstractmethod
    def cancel(self) -> bool:
        """Take it out of the queue; False where it has begun or ended (then it runs to its end)."""


class Tier(ABC):
    """A kind of memory below the device: host, disk, or a simulated one.

    Attributes:
        name: what the tier is called in reports.
        capacity: bytes it may hold.
        used, peak: bytes in slots now, and the most there ever were.
        traffic: bytes and transfers each way.
    """

    def __init__(self, name: str, capacity: int) -> None:
        self.name, self.capacity = name, capacity
        self.used = self.peak = 0
        self.traffic = Traffic()

    @abstractmethod
    def allocate(self, nbytes: int) -> Slot:
        """Room for ``nbytes`` ≥ 1.

        Raises:
            TierFullError: there is none.
        """

    def expect(self, nbytes: int) -> None:  # noqa: B027  most tiers have no use for it
        """A hint: so many bytes are to be put in from now on, in the reverse order of their coming back."""

    @abstractmethod
    def release(self, slot: Slot) -> None:
        """Give the room back. A transfer of this slot that is still under way keeps it until it has ended."""

    @abstractmethod
    def write(self, slot: Slot, source: torch.UntypedStorage | None, ended: Ended) -> Transfer:
        """Copy ``source`` (all its bytes; None: only simulate it) to ``slot``. The tier holds ``source`` until the end."""

    @abstractmethod
    def read(self, slot: Slot, target: torch.UntypedStorage | None, ended: Ended, *, urgent: bool = False) -> Transfer:
        """Copy ``slot`` to ``target``, after any write to the slot that is under way. ``urgent``: ahead of all that is queued."""

    @abstractmethod
    def poll(self) -> None:
        """Notice the transfers that have ended by now and call their ``Ended``."""

    @abstractmethod
    def bandwidth(self) -> tuple[float, float]:
        """Bytes per second of writes and of reads, as measured (a simulated tier: as configured)."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back; what has not begun ends with an error, further use is one. Safe to call twice."""

    def _took(self, nbytes: int) -> None:
        self.used += nbytes
        self.peak = max(self.peak, self.used)
