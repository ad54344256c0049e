"""The books of a pass where transfers end at awkward moments."""

from __future__ import annotations

import pytest

from laneway.memory.clock import VirtualClock
from laneway.memory.residency import Choice, Entry, Residency, Schedule, State
from laneway.memory.simulated import SimulatedTier


class Ending(SimulatedTier):
    """A tier in which the copy out ends in the very moment in which it is to be called back."""

    def write(self, slot, source, ended):
        transfer = super().write(slot, source, ended)
        cancel = transfer.cancel

        def ends() -> bool:
            self.clock.advance(1e6)
            return cancel()

        transfer.cancel = ends
        return transfer


class Hands:
    """Notes what is asked of them."""

    def __init__(self) -> None:
        self.here: dict[int, bool] = {}

    def stored(self, entry: Entry) -> int:
        return entry.nbytes

    def came(self, entry: Entry) -> None:
        assert self.here[entry.index]

    def source(self, entry: Entry) -> None:
        self.here[entry.index] = True

    def target(self, entry: Entry) -> None:
        self.here[entry.index] = True

    def let_go(self, entry: Entry) -> None:
        self.here[entry.index] = False

    def recompute(self, entry: Entry) -> None:
        self.here[entry.index] = True


@pytest.fixture
def books() -> Residency:
    clock = VirtualClock()
    found = Residency(Ending(clock, 1 << 30, 1e3, 1e3), clock, Hands())
    found.begin(Schedule([Choice.MOVE] * 9, [1e9]))
    return found


def test_what_is_gone_as_it_is_called_back_is_fetched(books):
    entry = Entry(0, 100)
    books.save(entry)
    assert entry.state is State.LEAVING
    books.use(entry)
    assert entry.state is State.RESIDENT
    assert books.hands.here[0]
    assert (books.account.misses, books.resident, books.leaving_bytes) == (1, 100, 0)
    books.free(entry)
    assert (books.resident, books.tier.used) == (0, 0)


def test_the_same_in_a_prefetch_and_at_the_end(books):
    entries = [Entry(index, 100) for index in range(3)]
    for entry in entries:
        books.save(entry)
    books.use(entries[2])  # looks ahead to the others
    for entry in reversed(entries):
        books.use(entry)
        assert books.hands.here[entry.index]
        books.free(entry)
    gone = Entry(3, 100)
    books.save(gone)
    books.free(gone)
    books.clock.advance(1e9)
    books.tier.poll()
    assert (books.resident, books.leaving_bytes, books.tier.used) == (0, 0, 0)
