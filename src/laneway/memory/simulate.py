"""A plan tried on paper: the pass of a profile run again on a virtual clock, by the code that also moves the real tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from laneway.memory.clock import VirtualClock
from laneway.memory.profile import PassProfile, ahead
from laneway.memory.residency import Account, Choice, Entry, Residency, Schedule
from laneway.memory.simulated import SimulatedTier
from laneway.memory.stack import StackedTier
from laneway.memory.tier import Tier

LOOK_AHEAD = 8  # events of unmanaged demand that the allowance leaves room for, so that what comes back early doesn't overshoot


@dataclass(frozen=True)
class Link:
    """The way to the tier: bytes per second each way, seconds a transfer takes on top, whether both ways go at once.

    ``capacity``: bytes that the tier has room for; ``below``: the way to the tier that takes what is more.
    """

    write_bandwidth: float
    read_bandwidth: float
    latency: float = 1e-4
    duplex: bool = False
    capacity: int = 1 << 60
    below: Link | None = None

    def tiers(self, clock: VirtualClock) -> list[SimulatedTier]:
        """A simulated tier behind this link, and behind each below it."""
        here = SimulatedTier(clock, self.capacity, self.write_bandwidth, self.read_bandwidth, self.latency, self.duplex)
        return [here, *(self.below.tiers(clock) if self.below is not None else [])]

    def tier(self, clock: VirtualClock) -> Tier:
        """The tiers as one."""
        found = self.tiers(clock)
        return found[0] if len(found) == 1 else StackedTier(found)


@dataclass(frozen=True)
class Outcome:
    """What a plan comes to.

    Attributes:
        seconds: of the pass.
        peak: most bytes on the device.
        account: the books.
        busy_seconds: time that the link was in use.
        trace: (seconds, bytes on the device) before each event.
    """

    seconds: float
    peak: int
    account: Account
    busy_seconds: float
    trace: tuple[tuple[float, int], ...] = field(default=(), repr=False)


def allowances(profile: PassProfile, budget: float) -> list[float]:
    """Managed bytes that may be resident at each event, so that all bytes stay within ``budget``."""
    return [budget - other for other in ahead([event.other for event in profile.events], LOOK_AHEAD)]


def simulate(
    profile: PassProfile, choices: Sequence[Choice], link: Link, budget: float, *, speed: float = 1.0, prefetch: bool = True
) -> Outcome:
    """Run the pass.

    Args:
        choices: for each entry.
        link: the way to the tier.
        budget: bytes on the device.
        speed: how much faster than in the profile the computation is assumed to be.
        prefetch: bring entries back before they are asked for.
    """
    clock = VirtualClock()
    tiers = link.tiers(clock)
    tier = tiers[0] if len(tiers) == 1 else StackedTier(tiers)
    tier.expect(moved_bytes(profile, choices))
    schedule = Schedule(choices, allowances(profile, budget), profile.order(), profile.held(), prefetch)
    return _Pass(profile, clock, 1.0 / speed).run(tier, schedule, lambda: sum(each.busy_seconds for each in tiers))


def moved_bytes(profile: PassProfile, choices: Sequence[Choice]) -> int:
    """Bytes that these choices put into the tier."""
    return sum(entry.moved for entry, what in zip(profile.entries, choices, strict=True) if what is Choice.MOVE)


class _Pass:
    """The events of a profile; also the hands that have nothing to touch."""

    def __init__(self, profile: PassProfile, clock: VirtualClock, scale: float) -> None:
        self.profile, self.clock, self.scale = profile, clock, scale
        self.entries: dict[int, Entry] = {}

    def run(self, tier: Tier, schedule: Schedule, busy_seconds: Callable[[], float]) -> Outcome:
        books = Residency(tier, self.clock, self)
        books.begin(schedule)
        trace: list[tuple[float, int]] = []
        for event in self.profile.events:
            trace.append((self.clock.now(), event.other + books.resident))
            self.clock.advance(event.seconds * self.scale)
            if event.kind == "save":
                books.save(self._entry(event.entry, schedule))
            elif event.kind == "use":
                books.use(self.entries[event.entry])
            else:
                books.free(self.entries[event.entry])
        self.clock.advance(self.profile.tail * self.scale)
        peak = max((nbytes for _, nbytes in trace), default=self.profile.static)
        return Outcome(self.clock.now(), peak, books.account, busy_seconds(), tuple(trace))

    def _entry(self, index: int, schedule: Schedule) -> Entry:
        facts = self.profile.entries[index]
        entry = self.entries[index] = Entry(index, facts.nbytes)
        if schedule.choice(index) is Choice.RECOMPUTE:
            entry.seconds = (facts.seconds or 0.0) * self.scale
            entry.needs = tuple(self.entries[needed] for needed in facts.needs)
        return entry

    # -- hands

    def stored(self, entry: Entry) -> int:
        """As in the profile."""
        return self.profile.entries[entry.index].moved

    def source(self, entry: Entry) -> None:
        """Nothing to write; coding takes its time."""
        self.clock.advance(self.profile.entries[entry.index].coding * self.scale)

    def target(self, entry: Entry) -> None:
        """Nothing to read into."""

    def came(self, entry: Entry) -> None:
        """Nothing to take; decoding takes as long as coding."""
        self.clock.advance(self.profile.entries[entry.index].coding * self.scale)

    def let_go(self, entry: Entry) -> None:
        """Nothing to let go of."""

    def recompute(self, entry: Entry) -> None:
        """Time passes."""
        self.clock.advance(entry.seconds)
