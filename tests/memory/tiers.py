"""Tiers for tests of what moves into them, and storages with random bytes."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from pathlib import Path

import torch

from laneway.memory.clock import VirtualClock
from laneway.memory.disk import DiskTier
from laneway.memory.host import HostTier
from laneway.memory.simulated import SimulatedTier
from laneway.memory.tier import Tier

KINDS = ("disk", "buffered", "host", "simulated")


def make_tier(kind: str, folder: Path, capacity: int = 8 << 20) -> Tier:
    """A tier of this kind; the disk's file lies in ``folder``."""
    makers: dict[str, Callable[[], Tier]] = {
        "disk": lambda: DiskTier(folder, capacity),
        "buffered": lambda: DiskTier(folder, capacity, direct=False),
        "host": lambda: HostTier(capacity, "cpu"),
        "simulated": lambda: SimulatedTier(VirtualClock(), capacity, 2e8, 3e8, latency=1e-4),
    }
    return makers[kind]()


def noise(nbytes: int, seed: int | None = None) -> torch.UntypedStorage:
    """A storage of random bytes."""
    storage = torch.UntypedStorage(nbytes)
    ctypes.memmove(storage.data_ptr(), random.Random(seed).randbytes(nbytes), nbytes)
    return storage


def same(a: torch.UntypedStorage, b: torch.UntypedStorage) -> bool:
    """Whether both hold the same bytes."""
    return content(a) == content(b)


def content(storage: torch.UntypedStorage) -> bytes:
    """Its bytes."""
    return ctypes.string_at(storage.data_ptr(), storage.nbytes())


class Ends:
    """An ``Ended`` that keeps what it was called with."""

    def __init__(self) -> None:
        self.errors: list[BaseException | None] = []

    def __call__(self, error: BaseException | None) -> None:
        self.errors.append(error)
