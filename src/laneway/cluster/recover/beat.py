"""The thread that shows this rank's sign of life and looks at the others'. It alone talks to the watch's store."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from laneway.cluster.recover.board import Board, Flags, Sign
from laneway.cluster.recover.members import Member
from laneway.cluster.recover.tether import Prober, Tether
from laneway.cluster.recover.verdict import Call, Limits, Sighting, Verdict, judge, suspects

__all__ = ["Beat"]

MONITORS = 64
"""Ranks that look at all others, spread evenly: what takes all of them takes the job."""


class Beat:
    """Its ``thread``, once started, runs until the store is gone or all have left.

    Args:
        board, tether, limits: what it works with.
        members: the world, this rank among them.
        ident: this rank's.
        on_verdict: called once a generation with what the ranks were told.
        on_break: called once, where the store's connection broke: why, and whose processes are gone.
        on_world: called with the idents of a new generation.
    """

    def __init__(
        self,
        board: Board,
        tether: Tether,
        limits: Limits,
        members: Sequence[Member],
        ident: int,
        *,
        on_verdict: Callable[[Verdict], None],
        on_break: Callable[[str, list[int]], None],
        on_world: Callable[[list[int]], None],
    ) -> None:
        self.thread = threading.Thread(target=self._run, name="laneway-beat", daemon=True)
        self.board, self.tether, self.limits, self.ident = board, tether, limits, ident
        self.on_verdict, self.on_break, self.on_world = on_verdict, on_break, on_world
        self.prober = Prober({member.ident: member for member in members}[ident].machine)
        self.contact = time.monotonic()
        self.generation, self.count, self.answered = 0, 0, -1
        self.joining = self.leaving = 0
        self.join_until = 0.0
        self.call: Call | None
        self.verdict: Verdict | None
        self._wake = threading.Event()
        self._enter(members)

    def _enter(self, members: Sequence[Member]) -> None:
        self.members = {member.ident: member for member in members}
        idents = sorted(self.members)
        step = max(1, -(-len(idents) // MONITORS))
        self.monitor = self.ident in idents[::step]
        self.seen: dict[int, tuple[Sign, float, int]] = {}
        self.call = self.verdict = None
        self.meetings = 3 * step

    # -- asked for by other threads

    def report(self, text: str) -> None:
        """Call the roll: this rank had an error."""
        self.call = Call(self.ident, text)
        self._wake.set()

    def join_next(self, seconds: float) -> None:
        """Ask to be in the next generation; after ``seconds`` it begins without those that have not asked."""
        self.join_until = time.monotonic() + seconds
        self.joining = self.generation + 1
        self._wake.set()

    def leave(self) -> None:
        """Show that this rank is done; the thread ends when all are."""
        self.leaving = 1
        self._wake.set()

    # -- the thread

    def _run(self) -> None:
        going = True
        while going:
            started = time.monotonic()
            try:
                going = self._round()
            except Exception as error:  # noqa: BLE001 - a thread that ends unseen would leave all waiting for ever
                if not self.leaving:
                    others = [ident for ident in self.members if ident != self.ident]
                    self.on_break((str(error) or type(error).__name__).splitlines()[0], self._gone(others))
                break
            self.contact = started
            self._wake.wait(max(0.0, started + self.limits.beat - time.monotonic()))
            self._wake.clear()
        self.tether.close()

    def _round(self) -> bool:
        """One beat; returns whether to go on."""
        self.tether.drain()
        self.count += 1
        self.board.show(Sign(self.count, self.answered, self.joining, self.leaving))
        looks = self.monitor or self.leaving or self.joining > self.generation
        flags, signs = self.board.look(self.generation, list(self.members) if looks else [])
        self._note(signs)
        if self.leaving and all(sign.left for sign in signs.values()):
            return False
        if flags.verdict and self.verdict is None:
            self.verdict = Verdict.from_json(flags.verdict)
            self.on_verdict(self.verdict)
        if self.verdict is not None:
            if self.joining > self.generation:
                self._join(flags, signs, self.verdict)
        else:
            self._watch(flags)
        return True

    def _note(self, signs: dict[int, Sign]) -> None:
        now = time.monotonic()
        for ident, sign in signs.items():
            old = self.seen.get(ident)
            changed = old is None or old[0] != sign
            self.seen[ident] = (sign, now, 0) if old is None or changed else (sign, old[1], old[2] + 1)

    def _watch(self, flags: Flags) -> None:
        if self.call is not None:
            self.board.write_once("call", self.generation, self.call.to_json())
            self.call = None
            self._wake.set()
        call = Call(**json.loads(flags.call)) if flags.call else None
        if call is not None and self.answered != self.generation:
            self.answered = self.generation
            self._wake.set()
        if self.monitor:
            found = self._judge(call)
            if found is not None:
                self.board.write_once("verdict", self.generation, found.to_json())
                self._wake.set()

    def _judge(self, call: Call | None) -> Verdict | None:
        seen = self._sightings()
        asked = suspects(seen, call, self.limits)
        others = [member for ident, member in self.members.items() if ident != self.ident]
        if asked:
            gone = self._gone(asked)
        else:
            gone = []
            if self.meetings > 0:
                self.meetings -= 1
                self.prober.meet(others, self.limits.beat / 2)
        return judge(self.ident, seen, gone, asked, call, self.limits)

    def _gone(self, idents: Iterable[int]) -> list[int]:
        return sorted(self.prober.gone([self.members[ident] for ident in idents], self.limits.beat / 2))

    def _sightings(self) -> dict[int, Sighting]:
        now, here = time.monotonic(), self.generation
        return {
            ident: Sighting(now - since, looks, sign.answered == here, bool(sign.left))
            for ident, (sign, since, looks) in self.seen.items()
            if ident != self.ident
        }

    def _join(self, flags: Flags, signs: dict[int, Sign], verdict: Verdict) -> None:
        if flags.world:
            idents = json.loads(flags.world)
            self.generation += 1
            self._enter([self.members[ident].now(rank) for rank, ident in enumerate(idents)])
            self.on_world(idents)
            return
        able = [ident for ident in sorted(self.members) if ident not in verdict.lost]
        ready = [ident for ident in able if ident == self.ident or signs[ident].joining > self.generation]
        seen = self._sightings()
        slow = [ident for ident in able if ident not in ready and seen[ident].age < self.limits.limit]
        if slow and time.monotonic() < self.join_until and len(self._gone(slow)) < len(slow):
            return
        self.board.close_world(self.generation, ready)
        self._wake.set()
