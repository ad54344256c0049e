"""What the books of a pass are about: entries, what is to be done with them, and what it came to. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from laneway.memory.tier import Slot, Transfer


class Choice(Enum):
    """What is to be done with an entry."""

    KEEP = "keep"
    MOVE = "move"
    RECOMPUTE = "recompute"


class State(Enum):
    """Where an entry's bytes are."""

    RESIDENT = "resident"
    LEAVING = "leaving"  # still resident, its copy to the tier is queued or under way
    AWAY = "away"
    COMING = "coming"  # room is taken, its copy back is queued or under way
    DROPPED = "dropped"  # to be computed again
    FREED = "freed"


class Entry:
    """One version of one storage that a backward pass will read.

    Attributes:
        index: its number among the entries of the pass, in order of saving.
        nbytes: size of the storage.
        users: how many saved tensors refer to it.
        needs, needed_by: entries that its recomputation reads; how many dropped entries read this one.
        seconds: what its recomputation takes, as far as known.
        touched: the event at which it was saved, or saved again, last.
        again: whether it can be computed again.
        stored: bytes that it takes in the tier, from when it is first sent.
        extra: bytes of a coded copy that is on the device while the entry leaves or comes; 0 where it moves as it is.
        lingers: its bytes have left, but whoever computes on still holds the original.
        body: what the engine needs to find the bytes; None in a simulation.
    """

    __slots__ = (
        "again", "body", "choice", "extra", "failure", "index", "lingers", "nbytes", "needed_by", "needs", "seconds", "slot",
        "state", "stored",
        "touched", "transfer", "used", "users",
    )  # fmt: skip

    def __init__(self, index: int, nbytes: int, body: Any = None) -> None:
        self.index, self.nbytes, self.body = index, nbytes, body
        self.users, self.needed_by, self.needs = 1, 0, ()
        self.state, self.choice, self.seconds = State.RESIDENT, Choice.KEEP, 0.0
        self.slot: Slot | None = None
        self.transfer: Transfer | None = None
        self.used = self.lingers = False
        self.again = True
        self.stored, self.extra = nbytes, 0
        self.touched = 0
        self.failure: BaseException | None = None

    needs: tuple[Entry, ...]


class Hands(Protocol):
    """Who touches the bytes that the books are about."""

    def stored(self, entry: Entry) -> int:
        """Bytes that the entry takes in the tier: its size, or less where it moves coded."""

    def source(self, entry: Entry) -> Any:
        """The storage to write out, of ``stored`` bytes (None in a simulation)."""

    def target(self, entry: Entry) -> Any:
        """A new storage to read into, of ``stored`` bytes (None in a simulation)."""

    def came(self, entry: Entry) -> None:
        """The target is filled: from now on it, or what it codes, is the entry's."""

    def let_go(self, entry: Entry) -> None:
        """Drop the references to the entry's storage."""

    def recompute(self, entry: Entry) -> None:
        """Compute the entry's bytes again."""


@dataclass
class Schedule:
    """What a pass is to do.

    Attributes:
        choices: for each entry by index; entries beyond are kept.
        allowance: managed bytes that may be resident, by event; the last one holds for events beyond.
        order: entries by first use, as learned; empty: the reverse of saving.
        held: for each entry the event until which others hold its storage: before that, its leaving frees nothing.
        prefetch: bring entries back before they are asked for, as far as the allowance goes.
        victims: where ``choices`` leave more than the allowance: whom to send out, best first, given the resident entries not
            used yet and the bytes wanted (a policy); None: nobody.
    """

    choices: Sequence[Choice] = ()
    allowance: Sequence[float] | Callable[[], float] = (float("inf"),)
    order: Sequence[int] = ()
    held: Sequence[int] = ()
    prefetch: bool = True
    victims: Callable[[list[Entry], float], Iterable[Entry]] | None = None

    def choice(self, index: int) -> Choice:
        """What to do with the entry of this index."""
        return self.choices[index] if index < len(self.choices) else Choice.KEEP

    def allowed(self, event: int) -> float:
        """Managed bytes that may be resident at this event."""
        if callable(self.allowance):
            return self.allowance()
        return self.allowance[min(event, len(self.allowance) - 1)]


@dataclass
class Account:
    """What a pass came to. Times in seconds, sizes in bytes."""

    write_stall: float = 0.0
    read_stall: float = 0.0
    recompute: float = 0.0
    coding: float = 0.0
    bytes_out: int = 0
    bytes_in: int = 0
    writes: int = 0
    reads: int = 0
    hits: int = 0
    misses: int = 0
    recomputed: int = 0
    recomputed_bytes: int = 0
    cancelled: int = 0
    refused: int = 0
    over_allowance: int = 0
    peak: int = 0
    saved: int = 0
    order: list[int] = field(default_factory=list)

    @property
    def stall(self) -> float:
        """Seconds the computation waited for transfers."""
        return self.write_stall + self.read_stall
