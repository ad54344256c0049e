"""State of the simulated device: what is in fast memory, on its way, in slow memory or dropped (see ``replay``)."""

from __future__ import annotations

import bisect
import copy
import math
from dataclasses import dataclass, replace

from laneway.core import LanewayError
from laneway.memory.held import Held, Level, known_uses
from laneway.memory.link import Link, Way
from laneway.memory.next_use import Expected, NextUse
from laneway.memory.policies import Policy, Victim, View
from laneway.memory.trace import Event, Trace

LATE = 0.05
"""Share of a step by which an entry may be late before its prediction is given up."""
MEMORY_OF_BUSY = 0.1
"""Time over which the link's utilisation is averaged, as a share of a step."""


@dataclass(frozen=True)
class Options:
    """What is simulated."""

    budget: int
    link: Link
    prefetch: float = 0.0
    write_behind: bool = False


@dataclass
class Counters:
    """What it has cost so far."""

    seconds: float = 0.0
    compute_seconds: float = 0.0
    stall_seconds: float = 0.0
    recompute_seconds: float = 0.0
    bytes_out: int = 0
    bytes_in: int = 0
    evictions: int = 0
    recomputations: int = 0


class Device:
    """Runs a trace step by step; ``policy`` may be exchanged between steps."""

    def __init__(self, trace: Trace, options: Options, policy: Policy) -> None:
        self.trace, self.options, self.policy = trace, options, policy
        self.held = [Held(number, entry, options.link, self._again, self._clock) for number, entry in enumerate(trace.entries)]
        for number in trace.given:
            self.held[number].copied, self.held[number].alive = 0.0, True
        self._known = known_uses(trace)
        self._dropped_on = [0] * len(self.held)
        self._predict = NextUse(trace.entries)
        self._residents: dict[int, Held] = {}
        self._leaving: dict[int, float] = {}  # evicted or freed, but its bytes are being copied until then
        self._away: list[tuple[float, int]] = []  # in slow memory, by the sure time of the next use
        self._group: set[int] = set()
        self._in = Way()
        self._out = Way() if options.link.duplex else self._in
        self._used = self._other = self.peak = 0
        self._level = Level(sum(trace.entries[number].nbytes for number in trace.given))
        self._now = self._compute = 0.0
        self._stuck: tuple[int, int] | None = None
        self._index = -1
        self._count = Counters()

    def counted(self) -> Counters:
        """A copy of the counters."""
        return replace(self._count, seconds=self._now, compute_seconds=self._compute)

    def copy(self) -> Device:
        """Another device in the same state, of the same trace."""
        shared: dict[int, object] = {id(part): part for part in (self.trace, self._known, *self.trace.entries)}
        return copy.deepcopy(self, shared)

    def _clock(self) -> float:
        return self._now

    def run_step(self, step: int) -> None:
        """All events of training step ``step``."""
        steps = self.trace.steps
        stop = steps[step + 1] if step + 1 < len(steps) else len(self.trace.events)
        self._predict.begin_step(self._compute)
        if step:
            self._level.begin_step()
        for held in self.held:
            if self._predict.sporadic(held.number) and held.last_use:
                self._expect(held, self._predict.again(held.number, self._compute, held.next_use))
        for index in range(steps[step], stop):
            self._index = index
            self._event(index, self.trace.events[index])

    def _event(self, index: int, event: Event) -> None:
        held, self._other = self.held[event.entry], event.other
        new = event.action == "produce" and not held.resident
        self._level.add(0 if held.alive else held.nbytes, event.other)
        held.alive = True
        if new:
            self._overwrite(held)
        elif event.action == "produce":
            self._group.add(held.number)
        self._make_room(held.nbytes if new else 0)
        if new:
            self._settle_in(held, self._now)
            self._group.add(held.number)
        if event.gap:
            self._advance(self._now + event.gap, computing=True)
            self._group.clear()
        if event.action == "free":
            self._free(held)
        else:
            self._group.add(held.number)
            if event.action == "use":
                self._ensure(held)
            else:
                held.copied = None
            held.last_use = self._compute
            held.known_use = self._known[index]
            self._expect(held, self._predict.access(held.number, self._compute))
        self._check(event)

    def _check(self, event: Event) -> None:
        """Whatever happens, these hold."""
        taken = self._used + self._other
        self.peak = max(self.peak, taken)
        if taken > self.options.budget:
            raise AssertionError(f"{taken} bytes in a budget of {self.options.budget}")
        if event.action != "free" and not self.held[event.entry].resident:
            raise AssertionError(f"entry {event.entry} is not there for its {event.action}")

    # Time

    def _advance(self, until: float, computing: bool, background: bool = True) -> None:
        """Let time pass; what the link does in the background is looked at whenever one of its ways becomes free."""
        while True:
            self._release()
            if background:
                self._prefetch()
                self._write_behind()
            free = [way.free_at for way in (self._in, self._out) if way.free_at > self._now]
            stop = min([until, *free])
            if computing:
                self._compute += stop - self._now
            self._now = stop
            self._observe()
            if stop >= until:
                self._release()
                return

    def _observe(self) -> None:
        length = self._predict.step_seconds
        span = MEMORY_OF_BUSY * (length if length < math.inf else self._compute)
        self._in.observe(self._now, span)
        self._out.observe(self._now, span)

    def _wait(self, until: float, background: bool) -> None:
        if until > self._now:
            self._count.stall_seconds += until - self._now
            self._advance(until, computing=False, background=background)

    # Room

    def _release(self) -> None:
        """Give back the bytes of copies that are done."""
        for number in [number for number, when in self._leaving.items() if when <= self._now]:
            del self._leaving[number]
            self._used -= self.held[number].nbytes

    def _short(self, nbytes: int) -> int:
        return self._used + self._other + nbytes - self.options.budget

    def _leaving_bytes(self) -> int:
        return sum(self.held[number].nbytes for number in self._leaving)

    def _candidates(self, after: float = -math.inf, uncopied: bool = False) -> list[Held]:
        """Entries that may go: there, not in use, expected later than ``after``; or only those that slow memory lacks."""
        overdue = self._compute - LATE * self._predict.step_seconds
        now, group, found = self._now, self._group, []
        for held in self._residents.values():
            if held.arrival > now or held.number in group:
                continue
            if held.next_use < overdue:
                self._expect(held, self._predict.again(held.number, self._compute, held.next_use))
            if held.next_use > after and not (uncopied and held.copied is not None):
                found.append(held)
        return found

    def _victims(self, need: int, candidates: list[Held], urgent: bool = False) -> list[Victim]:
        read, write, now = self._in, self._out, self._now
        backlog = read.backlog(now), write.backlog(now)
        return self.policy(View(self._compute, need, candidates, read.busy, write.busy, *backlog, urgent=urgent))

    def _make_room(self, nbytes: int) -> None:
        """Evict, and wait, until ``nbytes`` more fit."""
        while self._short(nbytes) > 0:
            self._release()
            need = self._short(nbytes) - self._leaving_bytes()
            if need > 0:
                victims = self._victims(need, self._candidates(), urgent=True)
                if not self._evict_all(victims):
                    continue
                if not victims and not self._leaving and not self._wait_for_arrival():
                    raise LanewayError(self._no_room(nbytes))
            if self._short(nbytes) > 0 and self._leaving:
                self._wait(min(self._leaving.values()), background=False)

    def _wait_for_arrival(self) -> bool:
        """Wait for the first entry on its way, which may go then; False where there is none."""
        coming = [h.arrival for h in self._residents.values() if h.arrival > self._now and h.number not in self._group]
        if coming:
            self._wait(min(coming), background=False)
        return bool(coming)

    def _no_room(self, nbytes: int) -> str:
        held = sum(self.held[number].nbytes for number in self._group if self.held[number].resident)
        return (
            f"{self.trace.name}: event {self._index} needs {nbytes} bytes besides {held} of its operation and {self._other} that "
            f"are not managed; the budget is {self.options.budget} bytes"
        )

    def _room_ahead(self, target: Held) -> bool:
        """Room for a prefetch, at the cost of entries that are expected later than it; False: not now."""
        need = self._short(target.nbytes) - self._leaving_bytes()
        if need > 0:
            victims = self._victims(need, self._candidates(target.next_use))
            if sum(victim.entry.nbytes for victim in victims) < need or not self._evict_all(victims):
                return False
        return self._short(target.nbytes) <= 0

    # Moves

    def _settle_in(self, held: Held, arrival: float) -> None:
        """``held`` takes its bytes of fast memory now and can be used from ``arrival`` on."""
        self._used += held.nbytes
        held.resident, held.arrival, held.born = True, arrival, self._compute
        self._residents[held.number] = held

    def _overwrite(self, held: Held) -> None:
        """What slow memory or a recomputation would give is out of date."""
        if held.dropped:
            self._undrop(held)
        held.copied = None
        self._forget_away(held)
        if held.number in self._leaving:  # its bytes are still there: wait for the copy that nobody will read
            self._wait(self._leaving[held.number], background=False)

    def _evict_all(self, victims: list[Victim]) -> bool:
        """Evict in order; False, and the rest stays, where a victim before makes it impossible to recompute one."""
        for place, victim in enumerate(victims):
            if victim.drop and victim.entry.recompute_seconds is None:
                if place:
                    return False
                victim = Victim(victim.entry)
            self._evict(victim)
        return True

    def _evict(self, victim: Victim) -> None:
        held = victim.entry
        assert isinstance(held, Held)
        self._count.evictions += 1
        held.resident = False
        del self._residents[held.number]
        if victim.drop:
            held.dropped, held.copied = True, None
            for number in held.entry.inputs:
                self._dropped_on[number] += 1
            self._used -= held.nbytes
            return
        if held.copied is None:
            self._copy_out(held)
        assert held.copied is not None
        if held.copied > self._now:
            self._leaving[held.number] = held.copied
        else:
            self._used -= held.nbytes
        if held.sure:
            bisect.insort(self._away, (held.next_use, held.number))

    def _copy_out(self, held: Held) -> None:
        held.copied = self._out.book(held.out_seconds, self._now)
        self._count.bytes_out += held.nbytes

    def _bring_in(self, held: Held) -> None:
        if held.copied is None or held.copied > self._now:
            raise AssertionError(f"entry {held.number} is read before it is written")
        self._forget_away(held)
        self._settle_in(held, self._in.book(held.reload_seconds, self._now))
        self._count.bytes_in += held.nbytes

    def _ensure(self, held: Held) -> None:
        """``held`` is in fast memory when this returns."""
        if not held.resident and held.number in self._leaving:  # not gone yet
            del self._leaving[held.number]
            self._forget_away(held)
            self._used -= held.nbytes
            self._settle_in(held, self._now)
        elif held.dropped:
            self._recompute(held)
        elif not held.resident:
            self._make_room(held.nbytes)
            self._bring_in(held)
        self._wait(held.arrival, background=True)

    def _recompute(self, held: Held) -> None:
        for number in held.entry.inputs:
            self._group.add(number)
            self._ensure(self.held[number])
        self._make_room(held.nbytes)
        self._undrop(held)
        self._settle_in(held, self._now)
        seconds = held.entry.recompute_seconds or 0.0
        self._count.recompute_seconds += seconds
        self._count.recomputations += 1
        self._advance(self._now + seconds, computing=False)

    def _undrop(self, held: Held) -> None:
        held.dropped = False
        for number in held.entry.inputs:
            self._dropped_on[number] -= 1

    def _free(self, held: Held) -> None:
        self._level.add(-held.nbytes)
        if held.dropped:
            self._undrop(held)
        self._forget_away(held)
        if held.resident:
            held.resident = False
            del self._residents[held.number]
            if held.copied is not None and held.copied > self._now:
                self._leaving[held.number] = held.copied
            else:
                self._used -= held.nbytes
        held.copied = None

    def _again(self, held: Held) -> float | None:
        """Recomputing one entry must not need another recomputation, or every drop could pull in the whole forward pass."""
        seconds = held.entry.recompute_seconds
        if seconds is None or self._dropped_on[held.number] or held.in_flight_seconds:
            return None
        for number in held.entry.inputs:
            source = self.held[number]
            if source.dropped:
                return None
            if not source.resident:
                seconds += source.reload_seconds
        return seconds

    # Background

    def _expect(self, held: Held, expected: Expected) -> None:
        away = not held.resident
        if away:
            self._forget_away(held)
        held.next_use, held.sure = expected.at, expected.sure
        if away and held.sure and held.copied is not None:
            bisect.insort(self._away, (held.next_use, held.number))

    def _forget_away(self, held: Held) -> None:
        place = bisect.bisect_left(self._away, (held.next_use, held.number))
        if place < len(self._away) and self._away[place] == (held.next_use, held.number):
            del self._away[place]

    def _prefetch(self) -> None:
        window = self.options.prefetch
        if not window or self._in.free_at > self._now or self._stuck == (self._index, len(self._leaving)):
            return
        while self._away and self._away[0][0] < self._compute - LATE * self._predict.step_seconds:
            held = self.held[self._away[0][1]]
            self._expect(held, self._predict.again(held.number, self._compute, held.next_use))
        for at, number in self._away:
            if at > self._compute + window:
                return
            if number in self._leaving:
                continue
            if self._room_ahead(self.held[number]):
                self._bring_in(self.held[number])
            else:
                self._stuck = (self._index, len(self._leaving))
            return

    def _write_behind(self) -> None:
        short = self._level.most > self.options.budget
        if not self.options.write_behind or not short or self._out.free_at > self._now:
            return
        now, candidates = self._compute, self._candidates(uncopied=True)
        candidates = [held for held in candidates if held.next_use - now > held.out_seconds + held.reload_seconds]
        found = self._victims(1, candidates)
        if found and found[0].drop:
            found = self._victims(sum(held.nbytes for held in candidates), candidates)
        for victim in found:
            if not victim.drop:
                assert isinstance(victim.entry, Held)
                self._copy_out(victim.entry)
                return
