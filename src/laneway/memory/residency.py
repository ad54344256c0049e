"""Where each managed tensor's bytes are, and when they go and come: the books of a training pass, without a tensor in them.

The planner's simulation and the engine that moves real tensors run this same code, one on a virtual clock and the other on real
transfers, so what was planned is what happens.

A pass is a sequence of events: an entry is *saved* (in the forward pass), its value is *used* for the first time and it is
*freed* (in the backward pass). Everything that may change the books happens in one of the three, on the caller's thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

from laneway.core import LanewayError
from laneway.memory.clock import Clock
from laneway.memory.entries import Account, Choice, Entry, Hands, Schedule, State
from laneway.memory.tier import Slot, Tier, TierFullError, Transfer

__all__ = ["Account", "Choice", "Entry", "Hands", "Residency", "Schedule", "State"]


class Residency:
    """The books of a pass; ``begin`` opens those of the next.

    Args:
        tier: where moved entries go.
        clock: what stalls are measured on.
        hands: who touches the bytes.
    """

    def __init__(self, tier: Tier, clock: Clock, hands: Hands) -> None:
        self.tier, self.clock, self.hands = tier, clock, hands
        self.lock = threading.RLock()
        self.resident = 0  # managed bytes on the device, over all passes that are still alive
        self.leaving_bytes = 0
        self._open = False
        self._late: list[Entry] = []  # freed by the garbage collector in the middle of an entry's business
        self.begin(Schedule())

    def begin(self, schedule: Schedule) -> None:
        """Start a pass: events and entries count from zero."""
        with self.lock:
            self.schedule = schedule
            self.entries: list[Entry] = []
            self.event = 0
            self.account = Account(peak=self.resident)
            self._leaving: deque[Entry] = deque()
            self._lingering: list[Entry] = []
            self._cursor: int | None = None
            self._sequence: Sequence[int] = ()

    # -- the three events

    def save(self, entry: Entry) -> None:
        """A new entry; it is resident."""
        with self._opened():
            self._next_event()
            self.entries.append(entry)
            entry.touched = self.event
            self.account.saved += entry.nbytes
            self._arrive(entry.nbytes)
            entry.choice = self.schedule.choice(entry.index)
            if entry.choice is Choice.RECOMPUTE and not entry.again:
                entry.choice = Choice.KEEP
            if entry.choice is Choice.RECOMPUTE:
                self._drop(entry)
            elif entry.choice is Choice.MOVE:
                self._send(entry)
            self._press()

    def use(self, entry: Entry) -> None:
        """The entry's value is needed now: it is resident when this returns."""
        with self._opened():
            if not entry.used:
                self._next_event()
                entry.used = True
                self.account.order.append(entry.index)
            self._begin_return()
            self._ensure(entry)
            self._prefetch()

    def free(self, entry: Entry) -> None:
        """A saved tensor that referred to the entry is gone."""
        with self.lock:
            if self._open:
                self._late.append(entry)
                return
        with self._opened():
            self._free(entry)

    def evict(self, nbytes: float) -> int:
        """Send out resident entries, those needed last first, until ``nbytes`` have left; waits for it. Returns the bytes."""
        with self._opened():
            freed = 0
            for entry in sorted(self._idle(), key=lambda e: self._next_use(e), reverse=True):
                if freed >= nbytes:
                    break
                if self._send(entry):
                    freed += entry.nbytes
            while self._leaving:
                self._wait_oldest()
            return freed

    def evict_if_idle(self, nbytes: float) -> int:
        """``evict``, unless the books are open, here or in another thread. Returns the bytes that left the device."""
        if not self.lock.acquire(blocking=False):
            return 0
        try:
            if self._open:
                return 0
            before = self.resident
            self.evict(nbytes)
            return before - self.resident
        finally:
            self.lock.release()

    @contextmanager
    def _opened(self) -> Generator[None]:
        """Hold the lock; what was freed meanwhile is seen to at the end."""
        with self.lock:
            outer, self._open = self._open, True
            try:
                yield
            finally:
                try:
                    while not outer and self._late:
                        self._free(self._late.pop())
                finally:
                    self._open = outer

    # -- going

    def _drop(self, entry: Entry) -> None:
        for needed in entry.needs:
            needed.needed_by += 1
        entry.state = State.DROPPED
        self._depart(entry)

    def _send(self, entry: Entry) -> bool:
        """Queue its copy to the tier; False where the tier is full: then it stays."""
        entry.stored = self.hands.stored(entry)
        try:
            slot = self.tier.allocate(entry.stored)
        except TierFullError:
            self.account.refused += 1
            return False
        try:
            source = self._source(entry)
        except (MemoryError, RuntimeError):  # no room for a coded copy
            self.resident -= entry.extra
            self.tier.release(slot)
            self.account.refused += 1
            return False
        entry.state, entry.slot = State.LEAVING, slot
        self.leaving_bytes += entry.nbytes + entry.extra
        self._leaving.append(entry)
        extra = entry.extra
        entry.transfer = self.tier.write(slot, source, lambda error: self._left(entry, slot, extra, error))
        return True

    def _source(self, entry: Entry) -> Any:
        """What to write; a coded copy is on the device too until it has left."""
        entry.extra = 0 if entry.stored == entry.nbytes else entry.stored
        self._arrive(entry.extra)
        start = self.clock.now()
        source = self.hands.source(entry)
        self.account.coding += self.clock.now() - start if entry.extra else 0.0
        return source

    def _stays(self, entry: Entry) -> None:
        """Its copy out was cancelled."""
        self.leaving_bytes -= entry.nbytes + entry.extra
        self.resident -= entry.extra
        self.account.cancelled += 1
        assert entry.slot is not None
        self.tier.release(entry.slot)

    def _left(self, entry: Entry, slot: Slot, extra: int, error: BaseException | None) -> None:
        """The copy out has ended."""
        self.leaving_bytes -= entry.nbytes + extra
        self.resident -= extra
        if error is None:
            self.account.bytes_out += slot.nbytes
            self.account.writes += 1
        wanted = entry.state is State.LEAVING and entry.slot is slot  # not freed nor asked for in the meantime
        if not wanted or error is not None:
            self.tier.release(slot)
            if error is not None:
                self.account.refused += 1
            if wanted:
                entry.state, entry.slot, entry.transfer = State.RESIDENT, None, None
            return
        entry.state = State.AWAY
        self._depart(entry)

    def _depart(self, entry: Entry) -> None:
        self.hands.let_go(entry)
        held = self.schedule.held
        if entry.index < len(held) and held[entry.index] > self.event and self.entries[entry.index] is entry:
            entry.lingers = True
            self._lingering.append(entry)
        else:
            self.resident -= entry.nbytes

    def _next_event(self) -> None:
        self.event += 1
        if self._lingering:
            for entry in [e for e in self._lingering if self.schedule.held[e.index] <= self.event]:
                self._gone(entry)

    def _gone(self, entry: Entry) -> None:
        entry.lingers = False
        self._lingering.remove(entry)
        self.resident -= entry.nbytes

    def _press(self) -> None:
        """Hold the allowance: send victims out if the schedule names some, and wait for what is leaving."""
        self.tier.poll()
        allowed = self.schedule.allowed(self.event)
        victims = self.schedule.victims
        if victims is not None and self.resident - self.leaving_bytes > allowed:
            wanted = self.resident - self.leaving_bytes - allowed
            for victim in victims(self._idle(), wanted):
                if self.resident - self.leaving_bytes <= allowed or not self._send(victim):
                    break
        while self._leaving and self.resident > allowed:
            self.account.write_stall += self._wait_oldest()
        if self.resident > allowed:
            self.account.over_allowance += 1

    def _wait_oldest(self) -> float:
        entry = self._leaving.popleft()
        if entry.state is State.LEAVING and entry.transfer is not None:
            try:
                return self._wait(entry.transfer)
            except (OSError, LanewayError) as error:  # it could not be written: ``_left`` was told, and it stays
                error.__traceback__ = None  # its frames hold what is being saved
        return 0.0

    def _wait(self, transfer: Transfer) -> float:
        """Seconds until its end, but for what decoding took meanwhile."""
        before = self.account.coding
        waited = transfer.wait()
        return max(0.0, waited - (self.account.coding - before))

    def _idle(self) -> list[Entry]:
        return [e for e in self.entries if e.state is State.RESIDENT and not e.used and (e.users or e.needed_by)]

    # -- coming back

    def _begin_return(self) -> None:
        if self._cursor is None:
            order = self.schedule.order
            self._sequence = order if len(order) == len(self.entries) else range(len(self.entries) - 1, -1, -1)
            self._cursor = 0

    def _next_use(self, entry: Entry) -> int:
        """Place in the learned order of first uses; without one, what was saved first is used last."""
        order = self.schedule.order
        if len(order) > entry.index:
            try:
                return order.index(entry.index)
            except ValueError:
                return len(order)
        return -entry.index

    def _ensure(self, entry: Entry) -> None:
        self.tier.poll()
        if entry.state is State.RESIDENT:
            self.account.hits += 1
            return
        if entry.state is State.DROPPED:
            self._compute_again(entry)
            return
        if entry.state is State.LEAVING:
            self._call_back(entry)
        if entry.state is State.AWAY:
            self.account.misses += 1
            self._fetch(entry, urgent=True)
        if entry.state is State.COMING and entry.transfer is not None:
            self.account.read_stall += self._wait(entry.transfer)
        if entry.failure is not None:
            raise entry.failure

    def _compute_again(self, entry: Entry) -> None:
        for needed in entry.needs:
            self._ensure(needed)
        self._arrive(entry.nbytes)
        start = self.clock.now()
        self.hands.recompute(entry)
        self.account.recompute += self.clock.now() - start
        self.account.recomputed += 1
        self.account.recomputed_bytes += entry.nbytes
        entry.state = State.RESIDENT
        self._done_with_needs(entry)

    def _call_back(self, entry: Entry) -> None:
        """It is asked for while it leaves: it is still here, and stays, unless it is gone at this very moment."""
        assert entry.transfer is not None
        assert entry.slot is not None
        if entry.transfer.cancel():
            self._stays(entry)
        elif entry.state is not State.LEAVING:
            return
        entry.state, entry.slot, entry.transfer = State.RESIDENT, None, None

    def _fetch(self, entry: Entry, *, urgent: bool = False) -> None:
        target = self.hands.target(entry)
        self._arrive(entry.nbytes + entry.extra)
        entry.state = State.COMING
        slot = entry.slot
        assert slot is not None
        entry.transfer = self.tier.read(slot, target, lambda error: self._came(entry, slot, error), urgent=urgent)

    def _came(self, entry: Entry, slot: Slot, error: BaseException | None) -> None:
        """The copy back has ended."""
        self.account.bytes_in += slot.nbytes
        self.account.reads += 1
        self.tier.release(slot)
        entry.slot = None
        if entry.state is State.COMING:
            entry.state = State.RESIDENT
            entry.failure = error
            if error is None:
                start = self.clock.now()
                self.hands.came(entry)
                self.account.coding += self.clock.now() - start if entry.extra else 0.0
        self.resident -= entry.extra

    def _prefetch(self) -> None:
        """Bring back what is used next, in order, as far as the allowance goes."""
        if self._cursor is None or not self.schedule.prefetch:
            return
        allowed = self.schedule.allowed(self.event)
        while self._cursor < len(self._sequence):
            entry = self.entries[self._sequence[self._cursor]]
            if entry.state is State.LEAVING:
                self._call_back(entry)
            if entry.state is State.AWAY and (entry.users or entry.needed_by):
                if self.resident + entry.nbytes + entry.extra > allowed:
                    return
                try:
                    self._fetch(entry)
                except (MemoryError, RuntimeError):  # no room now, whatever the allowance says: it comes when it is asked for
                    return
            self._cursor += 1

    # -- the end

    def _free(self, entry: Entry) -> None:
        entry.users -= 1
        if entry.users == 0:
            self._next_event()
        self._free_if_unneeded(entry)
        if entry.state is State.FREED and self._cursor is not None:
            self._prefetch()

    def _done_with_needs(self, entry: Entry) -> None:
        needs, entry.needs = entry.needs, ()
        for needed in needs:
            needed.needed_by -= 1
            self._free_if_unneeded(needed)

    def _free_if_unneeded(self, entry: Entry) -> None:
        if entry.users or entry.needed_by or entry.state is State.FREED:
            return
        before, entry.state = entry.state, State.FREED
        if entry.lingers:
            self._gone(entry)
        if before in (State.RESIDENT, State.COMING, State.LEAVING):
            self.resident -= entry.nbytes
        if before is State.LEAVING and entry.transfer is not None and entry.slot is not None and entry.transfer.cancel():
            self._stays(entry)
        elif before is State.AWAY and entry.slot is not None:
            self.tier.release(entry.slot)
        if before is State.DROPPED:
            self._done_with_needs(entry)
        entry.slot = None
        self.hands.let_go(entry)

    def _arrive(self, nbytes: int) -> None:
        self.resident += nbytes
        self.account.peak = max(self.account.peak, self.resident)
