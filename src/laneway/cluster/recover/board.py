"""The keys that a watch keeps in its store. One client, one thread: a store's client answers one question at a time.

``member/ID``: who it is; ``sign/ID``: its heart-beat; ``call/GENERATION``, ``verdict/GENERATION``, ``world/GENERATION``: written
once, by whoever comes first. A generation is the world between two regroupings.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from laneway.cluster.recover.members import Member
from laneway.core import LanewayError

__all__ = ["Board", "Flags", "Sign", "another"]


@dataclass(frozen=True)
class Sign:
    """A heart-beat: a count, the last roll call answered, the last generation asked for, and whether the rank has left."""

    count: int = 0
    answered: int = -1
    joining: int = 0
    left: int = 0

    def to_text(self) -> str:
        """As the store holds it."""
        return f"{self.count} {self.answered} {self.joining} {self.left}"

    @classmethod
    def from_text(cls, text: bytes) -> Sign:
        """Undo of ``to_text``."""
        return cls(*map(int, text.split()))


@dataclass(frozen=True)
class Flags:
    """What was written once for a generation; empty where nothing was."""

    call: bytes
    verdict: bytes
    world: bytes


def another(store: dist.Store) -> dist.Store:
    """The same store over a connection of its own, for another thread."""
    known: Any = store  # torch's type stubs lack the method
    return known.clone()


class Board:
    """Reads and writes the keys of one rank's watch.

    Args:
        store: a client of its own, under a prefix of its own.
        ident: this rank's.
    """

    def __init__(self, store: dist.Store, ident: int) -> None:
        self.store, self.ident = store, ident

    def sign_in(self, own: Member, size: int, timeout: timedelta) -> list[Member]:
        """Say who we are and wait for the others. Raises LanewayError where some don't come."""
        self.open_generation(0)
        self.show(Sign())
        self.store.set(f"member/{self.ident}", own.to_json())
        keys = [f"member/{ident}" for ident in range(size)]
        try:
            self.store.wait(keys, timeout)
        except RuntimeError as error:
            missing = [ident for ident, key in enumerate(keys) if not self.store.check([key])]
            late = ", ".join(map(str, missing)) or "none any more"
            raise LanewayError(f"{timeout.total_seconds():g} s have passed, and ranks have not come: {late} of {size}") from error
        return [Member.from_json(text) for text in self.store.multi_get(keys)]

    def show(self, sign: Sign) -> None:
        """Write this rank's heart-beat."""
        self.store.set(f"sign/{self.ident}", sign.to_text())

    def look(self, generation: int, idents: Sequence[int]) -> tuple[Flags, dict[int, Sign]]:
        """The generation's flags and the signs of ``idents``, in one question."""
        names = [f"{name}/{generation}" for name in ("call", "verdict", "world")]
        found = self.store.multi_get([*names, *(f"sign/{ident}" for ident in idents)])
        signs = {ident: Sign.from_text(text) for ident, text in zip(idents, found[3:], strict=True)}
        return Flags(*map(bytes, found[:3])), signs

    def open_generation(self, generation: int) -> None:
        """Make the flags, empty, without touching what is there."""
        for name in ("call", "verdict", "world"):
            self.store.compare_set(f"{name}/{generation}", "", "")

    def write_once(self, name: str, generation: int, text: str) -> None:
        """Set a flag unless it is set."""
        self.store.compare_set(f"{name}/{generation}", "", text)

    def close_world(self, generation: int, idents: Sequence[int]) -> None:
        """Propose who takes part after ``generation``; the first proposal stands."""
        self.open_generation(generation + 1)
        self.write_once("world", generation, json.dumps(list(idents)))
