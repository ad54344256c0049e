"""What a rank is told when contact between ranks is lost. One error, the same on every rank that can still be reached."""

from __future__ import annotations

from collections.abc import Sequence

from laneway.cluster.recover.members import Member
from laneway.core import LanewayError

__all__ = ["CollectiveFailedError", "CutOffError", "LostContactError", "MinorityError", "RankLostError"]


class LostContactError(LanewayError):
    """The ranks can't go on together. After it no collective of the old groups may be called.

    Attributes:
        lost: the members that are gone, by rank; empty where none is.
        speaks: whether this rank is the one of those that have this error that should show it.
    """

    def __init__(self, message: str, lost: Sequence[Member] = (), speaks: bool = True) -> None:
        super().__init__(message)
        self.lost, self.speaks = tuple(lost), speaks


class RankLostError(LostContactError):
    """Ranks died, froze or were cut off."""


class CutOffError(LostContactError):
    """This rank reaches the store no more: it is on the wrong side of a cut network, or the store's host is gone.

    A rank with this error must stop: the others, which reach the store, go on without it.
    """


class MinorityError(LostContactError):
    """Too few ranks are left to go on: the others may be alive on the far side of a cut network."""


class CollectiveFailedError(LostContactError):
    """A rank failed or gave up while all are alive and in contact: a wrong shape, a timeout, an error of its own.

    Attributes:
        by: the member that said so.
    """

    def __init__(self, message: str, by: Member, speaks: bool = True) -> None:
        super().__init__(message, speaks=speaks)
        self.by = by


def describe(lost: Sequence[Member], size: int) -> str:
    """The lost in words, with their hosts: ``rank 3 of 8 on host n1 (process 4242)``."""
    if len(lost) == 1:
        return f"rank {lost[0].rank} of {size} on host {lost[0].host} (process {lost[0].process})"
    by_host: dict[str, list[int]] = {}
    for member in lost:
        by_host.setdefault(member.host, []).append(member.rank)
    where = ", ".join(f"{_listed(ranks)} on host {host}" for host, ranks in by_host.items())
    return f"ranks {where} of {size} ranks"


def _listed(ranks: Sequence[int], most: int = 8) -> str:
    shown = ", ".join(map(str, ranks[:most]))
    return shown if len(ranks) <= most else f"{shown} and {len(ranks) - most} more"
