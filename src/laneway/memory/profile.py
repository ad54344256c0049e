"""What one pass of training was seen to do, as far as memory is concerned: the planner's input. No torch here."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

Kind = Literal["save", "use", "free"]


@dataclass
class EntryProfile:
    """A storage that the pass saved.

    Attributes:
        nbytes: its size.
        name: the module that can compute it again, for reports; empty where none can.
        seconds: what computing it again takes; None: it can't be.
        needs: entries that computing it again reads.
        held: the event until which others than autograd hold the storage; before it, nothing is gained by moving the entry.
        block: number of the block (in ``PassProfile.blocks``) whose checkpointing does away with it.
        stored: bytes that it moves as, where it moves coded; 0: as it is.
        coding: seconds that coding it takes, and decoding it again.
    """

    nbytes: int
    name: str = ""
    seconds: float | None = None
    needs: tuple[int, ...] = ()
    held: int = 0
    block: int | None = None
    stored: int = 0
    coding: float = 0.0

    @property
    def moved(self) -> int:
        """Bytes that move."""
        return self.stored or self.nbytes


@dataclass
class Event:
    """A change of the books, and what came before it.

    Attributes:
        kind, entry: what happened to which entry.
        seconds: computation since the event before.
        other: most bytes on the device in that time that are not managed.
    """

    kind: Kind
    entry: int
    seconds: float
    other: int


@dataclass
class BlockProfile:
    """A block that may be checkpointed.

    Attributes:
        name: of the module.
        seconds: what its forward pass takes.
        inputs: entries that hold its arguments; they are needed when it is computed again.
    """

    name: str
    seconds: float
    inputs: tuple[int, ...] = ()


@dataclass
class PassProfile:
    """A forward and a backward pass.

    Attributes:
        entries, events, blocks: see there.
        static: bytes on the device when the pass began.
        tail: seconds after the last event.
    """

    entries: list[EntryProfile] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    blocks: list[BlockProfile] = field(default_factory=list)
    static: int = 0
    tail: float = 0.0

    @property
    def seconds(self) -> float:
        """Time of the whole pass."""
        return sum(event.seconds for event in self.events) + self.tail

    @property
    def saved(self) -> int:
        """Bytes of all entries."""
        return sum(entry.nbytes for entry in self.entries)

    @property
    def forward_seconds(self) -> float:
        """Time until the last entry was saved."""
        last = max((at for at, event in enumerate(self.events) if event.kind == "save"), default=-1)
        return sum(event.seconds for event in self.events[: last + 1])

    @property
    def peak(self) -> int:
        """Most bytes on the device, everything kept."""
        resident, peak = 0, self.static
        for event in self.events:
            peak = max(peak, event.other + resident)
            resident += self._change(event)
        return peak

    @property
    def floor(self) -> int:
        """Most bytes that are not managed: no plan gets below."""
        return max((event.other for event in self.events), default=self.static)

    def order(self) -> list[int]:
        """Entries by first use."""
        return [event.entry for event in self.events if event.kind == "use"]

    def held(self) -> list[int]:
        """For each entry the event until which others hold its storage."""
        return [entry.held for entry in self.entries]

    def beta(self, write_bandwidth: float) -> float:
        """Saved bytes produced per second of the forward pass over what the tier can take: above 1 moving all must stall."""
        return sum(entry.moved for entry in self.entries) / max(self.forward_seconds, 1e-12) / write_bandwidth

    def lifetimes(self) -> list[tuple[int, int, int]]:
        """For each entry the events at which it is saved, first used and freed (−1: not seen)."""
        found = [[-1, -1, -1] for _ in self.entries]
        for at, event in enumerate(self.events):
            found[event.entry][("save", "use", "free").index(event.kind)] = at
        return [(a, b, c) for a, b, c in found]

    def live(self) -> list[int]:
        """Managed bytes before each event, everything kept."""
        resident, found = 0, []
        for event in self.events:
            found.append(resident)
            resident += self._change(event)
        return found

    def shifted(self, nbytes: int) -> PassProfile:
        """The same pass with ``nbytes`` more on the device throughout, such as optimizer state that was made since."""
        events = [replace(event, other=event.other + nbytes) for event in self.events]
        return replace(self, events=events, static=self.static + nbytes)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> PassProfile:
        """Undo of ``to_dict``."""
        entries = [replace(EntryProfile(**entry), needs=tuple(entry["needs"])) for entry in data["entries"]]
        events = [Event(**event) for event in data["events"]]
        blocks = [replace(BlockProfile(**block), inputs=tuple(block["inputs"])) for block in data["blocks"]]
        return cls(entries, events, blocks, data["static"], data["tail"])

    def _change(self, event: Event) -> int:
        nbytes = self.entries[event.entry].nbytes
        return {"save": nbytes, "use": 0, "free": -nbytes}[event.kind]


def checkpointed(profile: PassProfile, blocks: Collection[int]) -> PassProfile:
    """What the pass becomes when these blocks are checkpointed: their entries are gone from the books.

    At the first use of one of a block's entries its forward pass runs again; from then on until they are freed its entries are
    among the unmanaged bytes.
    """
    gone = {at for at, entry in enumerate(profile.entries) if entry.block in blocks}
    number = {old: new for new, old in enumerate(at for at in range(len(profile.entries)) if at not in gone)}
    entries = []
    for old in number:
        entry = profile.entries[old]
        computable = entry.seconds is not None and not gone.intersection(entry.needs)
        needs = tuple(number[needed] for needed in entry.needs) if computable else ()
        entries.append(replace(entry, seconds=entry.seconds if computable else None, needs=needs))
    events: list[Event] = []
    begins: list[int] = []  # for each old event, the new one that it is part of
    rebuilt, seconds, other = 0, 0.0, 0
    used: set[int] = set()
    again: set[int] = set()
    for event in profile.events:
        begins.append(len(events))
        seconds, other = seconds + event.seconds, max(other, event.other + rebuilt)
        entry = profile.entries[event.entry]
        if event.entry in gone:
            assert entry.block is not None
            if event.kind == "use" and entry.block not in again:
                again.add(entry.block)
                for needed in profile.blocks[entry.block].inputs:
                    if needed in number and needed not in used:
                        used.add(needed)
                        events.append(Event("use", number[needed], seconds, other))
                        seconds, other = 0.0, 0
                seconds += profile.blocks[entry.block].seconds
                rebuilt += sum(e.nbytes for e in profile.entries if e.block == entry.block)
                other = max(other, event.other + rebuilt)
            elif event.kind == "free" and entry.block in again:
                rebuilt -= entry.nbytes
        elif event.kind != "use" or event.entry not in used:
            if event.kind == "use":
                used.add(event.entry)
            events.append(Event(event.kind, number[event.entry], seconds, other))
            seconds, other = 0.0, 0
    for held_entry in entries:
        held_entry.held = begins[held_entry.held] if held_entry.held < len(begins) else len(events)
    return PassProfile(entries, events, profile.blocks, profile.static, profile.tail + seconds)


def ahead(values: Sequence[int], window: int) -> list[int]:
    """The most of each value and the ``window`` − 1 after it."""
    return [max(values[at : at + window]) for at in range(len(values))]
