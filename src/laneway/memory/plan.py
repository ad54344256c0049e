"""What to keep, to move and to compute again in a pass, so that it stays within a budget at the least predicted time. No torch.

Every candidate is tried on paper (``simulate``); nothing is taken on faith. ``greedy`` searches over three numbers: how many of
the cheapest entries to compute again, how many blocks to checkpoint and how many of the earliest entries to move; then it lets
go of what turned out not to be needed. ``milp`` puts the choice as a linear program with integers (scipy's HiGHS), to compare.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from laneway.core import InputError, choice
from laneway.memory.profile import PassProfile, ahead, checkpointed
from laneway.memory.residency import Choice, Schedule
from laneway.memory.simulate import LOOK_AHEAD, Link, Outcome, allowances, simulate

SPEED = 1.15  # plans hold for computation this much faster than in the profile: a plan cut to its exact speed is brittle
GOOD_ENOUGH = 1.001  # of the time of keeping everything: no need to look further
SOLVERS = ("greedy", "milp")


@dataclass(frozen=True)
class Plan:
    """What a pass is to do, and what that is predicted to come to.

    Attributes:
        choices: for each entry of ``profile``.
        blocks: numbers of the blocks to checkpoint.
        profile: the pass with these blocks checkpointed.
        budget: bytes on the device that it was made for.
        feasible: whether the predicted peak is within the budget.
        reason: why it is what it is, in one clause.
        predicted, unmanaged: outcome of the plan, and of keeping everything.
        beta: bytes saved per second over what the tier takes.
        tried: candidates that were simulated.
    """

    choices: tuple[Choice, ...]
    blocks: tuple[int, ...]
    profile: PassProfile = field(repr=False)
    budget: float
    feasible: bool
    reason: str
    predicted: Outcome
    unmanaged: Outcome
    beta: float
    tried: int

    @property
    def overhead(self) -> float:
        """Predicted time over that of keeping everything, minus one."""
        return self.predicted.seconds / self.unmanaged.seconds - 1.0

    def schedule(self, static: int | None = None) -> Schedule:
        """For the engine; ``static``: bytes on the device as the pass begins, where that differs from the profile's."""
        shift = 0 if static is None else static - self.profile.static
        allowed = allowances(self.profile, self.budget - shift)
        return Schedule(self.choices, allowed or (float("inf"),), self.profile.order(), self.profile.held())

    def count(self, what: Choice) -> tuple[int, int]:
        """Entries of this choice, and their bytes."""
        sizes = [e.nbytes for e, c in zip(self.profile.entries, self.choices, strict=True) if c is what]
        return len(sizes), sum(sizes)


def make_plan(profile: PassProfile, budget: float, link: Link, *, solver: str = "greedy", recompute: bool = True) -> Plan:
    """The plan for a pass.

    Args:
        profile: what the pass was seen to do.
        budget: bytes on the device.
        link: the way to the tier.
        solver: ``greedy`` or ``milp``.
        recompute: whether computing again is a choice; otherwise entries are kept or moved.

    Raises:
        InputError: no such solver, or one that needs scipy where there is none.
    """
    choice("solver", solver, SOLVERS)
    if solver == "milp" and importlib.util.find_spec("scipy") is None:
        raise InputError("solver", solver, "greedy, or milp with scipy installed", "pip install 'laneway[solver]'")
    return _Search(profile, budget, link, recompute).run(solver)


class _Search:
    def __init__(self, profile: PassProfile, budget: float, link: Link, recompute: bool) -> None:
        self.profile, self.budget, self.link, self.recompute = profile, budget, link, recompute
        self.tried = 0
        self.kept = simulate(profile, [Choice.KEEP] * len(profile.entries), link, float("inf"))

    def run(self, solver: str) -> Plan:
        everything_kept = _Candidate((), self.profile, (Choice.KEEP,) * len(self.profile.entries), self.kept)
        if self.kept.peak <= self.budget:
            return self._plan(everything_kept, "everything fits")
        found = everything_kept
        for candidate in self._candidates(solver):
            found = min(found, candidate, key=self._rank)
            if found.outcome.peak <= self.budget and found.outcome.seconds <= GOOD_ENOUGH * self.kept.seconds / SPEED:
                break
        found = self._trimmed(found)
        if found.outcome.peak >= self.kept.peak:
            return self._plan(everything_kept, "nothing that could move or be computed again is there at the peak")
        if found.outcome.peak > self.budget:
            why = f"no plan gets below {found.outcome.peak} bytes: {self.profile.floor} are not managed"
            return self._plan(found, why)
        return self._plan(found, f"least predicted time of {self.tried} candidates")

    def _plan(self, found: _Candidate, reason: str) -> Plan:
        at_profile_speed = simulate(found.profile, found.choices, self.link, self.budget)
        fits = found.outcome.peak <= self.budget
        beta = self.profile.beta(self.link.write_bandwidth)
        return Plan(
            found.choices, found.blocks, found.profile, self.budget, fits, reason, at_profile_speed, self.kept, beta, self.tried
        )  # fmt: skip

    def _rank(self, found: _Candidate) -> tuple[float, float]:
        """Over the budget: by how much. Within: by time."""
        return max(0.0, found.outcome.peak - self.budget), found.outcome.seconds

    def _try(self, blocks: tuple[int, ...], profile: PassProfile, choices: Sequence[Choice]) -> _Candidate:
        self.tried += 1
        return _Candidate(blocks, profile, tuple(choices), simulate(profile, choices, self.link, self.budget, speed=SPEED))

    def _candidates(self, solver: str) -> Iterator[_Candidate]:
        for blocks in self._block_sets():
            profile = checkpointed(self.profile, blocks) if blocks else self.profile
            if solver == "milp":
                yield self._try(blocks, profile, _by_milp(profile, self.budget, self.link, self.recompute))
                continue
            best = None
            for again in self._recompute_sets(profile):
                found = self._fewest_moves(blocks, profile, again)
                yield found
                if best is not None and self._rank(found) > self._rank(best):
                    break  # more to compute again than pays
                best = found

    def _block_sets(self) -> list[tuple[int, ...]]:
        """The first c blocks, for a few c: what is saved first lives longest."""
        count = len(self.profile.blocks) if self.recompute else 0
        steps = sorted({round(count * part / 6) for part in range(7)})
        return [tuple(range(c)) for c in steps]

    def _recompute_sets(self, profile: PassProfile) -> list[set[int]]:
        """The cheapest k by seconds per byte, for a few k; none that reads another of them."""
        if not self.recompute:
            return [set()]
        able = [at for at, e in enumerate(profile.entries) if e.seconds is not None]
        able.sort(key=lambda at: (profile.entries[at].seconds or 0.0) / profile.entries[at].nbytes)
        chosen: list[int] = []
        for at in able:
            read_by_chosen = any(at in profile.entries[other].needs for other in chosen)
            if not read_by_chosen and not set(profile.entries[at].needs).intersection(chosen):
                chosen.append(at)
        return [set(chosen[:k]) for k in sorted({round(len(chosen) * part / 8) for part in range(9)})]

    def _fewest_moves(self, blocks: tuple[int, ...], profile: PassProfile, again: set[int]) -> _Candidate:
        """Move the earliest m entries that are not computed again, for the least m that fits, and a few more than that."""
        rest = [at for at in range(len(profile.entries)) if at not in again]

        def with_moves(m: int) -> _Candidate:
            moved = set(rest[:m])
            choices = [
                Choice.RECOMPUTE if at in again else Choice.MOVE if at in moved else Choice.KEEP
                for at in range(len(profile.entries))
            ]
            return self._try(blocks, profile, choices)

        low, high = 0, len(rest)
        best = with_moves(high)
        if best.outcome.peak > self.budget:
            return best
        while low < high:
            middle = (low + high) // 2
            found = with_moves(middle)
            if found.outcome.peak <= self.budget:
                high, best = middle, min(best, found, key=self._rank)
            else:
                low = middle + 1
        more = {min(len(rest), low + extra) for extra in (2, 5, 10)} - {low}
        return min([best, *(with_moves(m) for m in sorted(more))], key=self._rank)

    def _trimmed(self, found: _Candidate) -> _Candidate:
        """Keep what need not go: the latest first, in groups that get smaller, as long as nothing gets worse."""
        size = max(1, sum(choice is not Choice.KEEP for choice in found.choices) // 2)
        while True:
            going = [at for at, choice in enumerate(found.choices) if choice is not Choice.KEEP]
            for last in range(len(going), 0, -size):
                group = set(going[max(0, last - size) : last])
                choices = [Choice.KEEP if at in group else choice for at, choice in enumerate(found.choices)]
                other = self._try(found.blocks, found.profile, choices)
                if self._rank(other) <= self._rank(found):
                    found = other
            if size == 1:
                return found
            size = max(1, size // 4)


@dataclass(frozen=True)
class _Candidate:
    blocks: tuple[int, ...]
    profile: PassProfile
    choices: tuple[Choice, ...]
    outcome: Outcome


def _by_milp(profile: PassProfile, budget: float, link: Link, recompute: bool) -> list[Choice]:
    """Least stall and recomputation such that memory fits at every event of the pass where the link is assumed to keep up.

    Variables: for each entry move, recompute (0 or 1); the stall of writing and of reading. An entry that moves is away from its
    save to its first use, less the look-ahead; the link's time is that of all moved bytes against the time there is between.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    count = len(profile.entries)
    sizes = np.array([e.nbytes for e in profile.entries], dtype=float)
    moving = np.array([e.moved for e in profile.entries], dtype=float)
    lives = profile.lifetimes()
    stamps = np.cumsum([event.seconds for event in profile.events])
    others = ahead([event.other for event in profile.events], LOOK_AHEAD)
    live = profile.live()
    rows, low, high = [], [], []
    for at in range(len(profile.events)):
        if others[at] + live[at] <= budget:
            continue
        away = np.array([float(save + 1 < at <= use - 1) for save, use, _ in lives]) * sizes
        dropped = np.array([float(save < at <= use) for save, use, _ in lives]) * sizes
        rows.append(np.concatenate([away, dropped, [0.0, 0.0]]))
        low.append(min(others[at] + live[at] - budget, float(max(away.sum(), dropped.sum()))))
        high.append(np.inf)
    for at in range(count):  # one choice each
        row = np.zeros(2 * count + 2)
        row[at] = row[count + at] = 1.0
        rows.append(row), low.append(0.0), high.append(1.0)
    for at, entry in enumerate(profile.entries):  # nothing that is computed again reads what is computed again
        for needed in entry.needs:
            row = np.zeros(2 * count + 2)
            row[count + at] = row[count + needed] = 1.0
            rows.append(row), low.append(0.0), high.append(1.0)
    saved = np.array([stamps[save] if save >= 0 else 0.0 for save, _, _ in lives])
    used = np.array([stamps[use] if use >= 0 else stamps[-1] for _, use, _ in lives])
    turn = profile.forward_seconds
    for at in range(count):  # what was saved from here on is written before the pass turns; what is used up to here is read after
        for later, bandwidth, room, which in (
            (saved >= saved[at], link.write_bandwidth, turn - saved[at], 0),
            (used <= used[at], link.read_bandwidth, used[at] - turn, 1),
        ):
            row = np.zeros(2 * count + 2)
            row[:count] = later * moving / bandwidth
            row[2 * count + which] = -1.0
            rows.append(row), low.append(-np.inf), high.append(max(room, 0.0))
    moves = [link.latency + 2 * e.coding for e in profile.entries]
    cost = np.concatenate([moves, [e.seconds or 0.0 for e in profile.entries], [1.0, 1.0]])
    able = [1.0 if recompute and e.seconds is not None else 0.0 for e in profile.entries]
    bounds = Bounds(np.zeros(2 * count + 2), np.concatenate([np.ones(count), able, [np.inf, np.inf]]))
    integral = np.concatenate([np.ones(2 * count), [0, 0]])
    solved = milp(
        cost, constraints=LinearConstraint(np.array(rows), low, high), integrality=integral, bounds=bounds,
        options={"time_limit": 5.0, "mip_rel_gap": 0.01},
    )  # fmt: skip
    if solved.x is None:
        return [Choice.MOVE] * count
    x = np.round(solved.x)
    return [Choice.MOVE if x[at] else Choice.RECOMPUTE if x[count + at] else Choice.KEEP for at in range(count)]
