"""A rank, a host or a network that fails: noticed within a limit, named, and survived."""

from __future__ import annotations

from laneway.cluster.recover.board import another
from laneway.cluster.recover.errors import (
    CollectiveFailedError,
    CutOffError,
    LostContactError,
    MinorityError,
    RankLostError,
)
from laneway.cluster.recover.regroup import bury, leave, rebuild
from laneway.cluster.recover.watch import Watch

__all__ = [
    "CollectiveFailedError",
    "CutOffError",
    "LostContactError",
    "MinorityError",
    "RankLostError",
    "Watch",
    "another",
    "bury",
    "leave",
    "rebuild",
]
