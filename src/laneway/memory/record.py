"""What a pass does, written down as it happens: the planner's input."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import cast

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from laneway.memory.clock import Clock
from laneway.memory.meter import Meter
from laneway.memory.profile import BlockProfile, EntryProfile, Event, Kind, PassProfile
from laneway.memory.residency import Entry, Residency, State

OURS = 2  # references to a resident entry's storage that are the manager's own


class Recorder:
    """Told of every event of the books; reads the clock and the meter at each.

    Args:
        books: whose events they are.
        meter: the device's bytes.
        clock: the computation's time; stalls and recomputation are taken off.
        settle: waits for the device, so that times are those of the computation and not of launching it.
        coding: bytes that an entry moves as, and seconds that coding it takes; None: all move as they are.
    """

    def __init__(
        self,
        books: Residency,
        meter: Meter,
        clock: Clock,
        settle: Callable[[], None] = lambda: None,
        coding: Callable[[Entry], tuple[int, float]] | None = None,
    ) -> None:
        self.coding = coding
        self.books, self.meter, self.clock, self.settle = books, meter, clock, settle
        self.profile = PassProfile(static=meter.live())
        self.peak = 0
        self.block: int | None = None
        self._inputs: dict[int, set[int]] = {}  # storages that are a block's arguments
        self._other = 0
        self._lingering = 0
        self._shared: dict[int, tuple[Entry, StorageWeakRef]] = {}  # entries whose storage others hold, as far as is known
        self._aside = 0.0
        meter.reset_peak()
        self._since = self._now()

    def __call__(self, kind: str, entry: Entry) -> None:
        """An event is about to change the books."""
        if kind == "again":
            self._saved_again(entry)
            return
        self._look()
        now = self._now()
        self.profile.events.append(Event(cast(Kind, kind), entry.index, max(0.0, now - self._since), self._other))
        self._since, self._other = now, 0
        if kind == "save":
            self._new(entry)

    def finish(self) -> PassProfile:
        """The profile, when the pass has ended."""
        self._look()
        self.profile.tail = max(0.0, self._now() - self._since)
        return self.profile

    @contextmanager
    def aside(self) -> Generator[None]:
        """What is done here is none of the pass: its time and bytes don't count."""
        self._look()
        start = self.clock.now()
        try:
            yield
        finally:
            self._aside += self.clock.now() - start
            self.meter.reset_peak()

    def enter_block(self, number: int, name: str, storages: set[int]) -> float:
        """A block begins, given these storages; returns the time."""
        while len(self.profile.blocks) <= number:
            self.profile.blocks.append(BlockProfile(name, 0.0))
        self.profile.blocks[number].name = name
        self._inputs[number] = storages
        self.block = number
        return self._now()

    def leave_block(self, number: int, began: float, usable: bool) -> None:
        """A block ends; ``usable``: it may be checkpointed."""
        self.profile.blocks[number].seconds = self._now() - began
        self.block = None
        if not usable:
            for entry in self.profile.entries:
                if entry.block == number:
                    entry.block = None

    def _new(self, entry: Entry) -> None:
        recipe = entry.body.recipe
        facts = EntryProfile(entry.nbytes, block=self.block)
        if recipe is not None and recipe.seconds is not None:
            facts.name, facts.seconds = recipe.name, recipe.seconds
            facts.needs = tuple(sorted({needed.index for needed in recipe.entries()}))
        for number, storages in self._inputs.items():
            if entry.body.key in storages:
                facts.block = None
                block = self.profile.blocks[number]
                block.inputs = tuple(sorted({*block.inputs, entry.index}))
        self.profile.entries.append(facts)
        if self.coding is not None:
            with self.aside():
                facts.stored, facts.coding = self.coding(entry)
        self._shared[entry.index] = (entry, StorageWeakRef(entry.body.storage))

    def _saved_again(self, entry: Entry) -> None:
        """From another block: then checkpointing the first does not do away with it."""
        if entry.index < len(self.profile.entries) and self.profile.entries[entry.index].block != self.block:
            self.profile.entries[entry.index].block = None

    def _look(self) -> None:
        self.settle()
        peak = self.meter.peak()
        self.peak = max(self.peak, peak)
        before, self._lingering = self._lingering, self._look_at_holders()
        self._other = max(self._other, peak - self.books.resident - min(before, self._lingering))
        self.meter.reset_peak()

    def _look_at_holders(self) -> int:
        """Note whose storage autograd alone holds from this event on; returns the bytes that have left and are held still."""
        lingering, at = 0, len(self.profile.events)
        for index, (entry, storage) in list(self._shared.items()):
            if entry.state in (State.AWAY, State.DROPPED) and entry.body.storage is None:
                held = not storage.expired()
                lingering += entry.nbytes if held else 0
            elif entry.state is State.RESIDENT and entry.body.storage is not None:
                held = torch._C._storage_Use_Count(entry.body.key) > OURS
            else:  # on its way: the tier holds it too
                held = entry.state is not State.FREED
            self.profile.entries[index].held = at
            if not held:
                del self._shared[index]
        return lingering

    def _now(self) -> float:
        account = self.books.account
        return self.clock.now() - account.stall - account.recompute - account.coding - self._aside
