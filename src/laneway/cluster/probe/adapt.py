"""Another way to reduce while a level of the network is slow, and back when it is well again: an extension of the training loop.

What every rank saw in a step rides along with the statistics that are reduced once a step anyway. Before the next step each rank
works out from all ranks' numbers which levels are slow, which links, and what to do: the same on every rank, so that all
switch at the same step, without a message for it. Links are measured by a thread while forward passes leave them idle.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from laneway.cluster.costs.measured import WIRE_SHARE, MeasuredNetwork
from laneway.cluster.decisions import SameDecision, digest
from laneway.cluster.probe.health import UP, Baseline, Change, Health, Rules
from laneway.cluster.probe.ladder import Scheme, Step, choose_step, ladder
from laneway.cluster.probe.locate import Finding, Tree, locate
from laneway.cluster.probe.passive import GroupRates, PhaseTimer
from laneway.cluster.reduce.scheme import ReductionScheme, SchemeTable
from laneway.core import LanewayError, Statistics

if TYPE_CHECKING:
    from laneway.cluster.probe.links import LinkProbe, Round
    from laneway.cluster.reduce.reducer import HierarchicalReducer

__all__ = ["NetworkAdapter"]

ROWS = "network/rates"
RECENT = 3
"""Rounds of the probe of which the fastest transfer counts."""
MATTERS = 0.3
"""A level is slow where it lengthens all of a reduction by this share."""
Tell = Callable[..., object]
Ranks = tuple[int, ...]


class NetworkAdapter:
    """Watches a reducer's network and changes its scheme.

    Use as an extension of the training loop, or call in each step `on_step_begin`, reduce, `on_backward_end`, with the statistics
    started after it and finished before the next step.

    Args:
        reducer: with the scheme of good times.
        probe: measures links. Without it only collectives say how fast they are: nothing is dropped then, and a flat scheme
            stays, as neither would show when the link is well again.
        rules: when a level counts as slow.
        measured: predicts what a change brings; without it bytes count.
        nbytes: of a usual vector, for the prediction.
        tell: writes events: ``tell("network", level=…, link=…, state=…, was=…, ratio=…, **{"from": …, "to": …})``.
        debug: compare the ranks' decisions, one step later.

    Attributes:
        base: the scheme of good times.
        health: by level, innermost first; the last is that of flat collectives.
        links: by slow level: what was found.
        switches: changes of the scheme so far.
    """

    def __init__(
        self,
        reducer: HierarchicalReducer,
        *,
        probe: LinkProbe | None = None,
        rules: Rules | None = None,
        measured: MeasuredNetwork | None = None,
        nbytes: float = 16 * 2**20,
        tell: Tell | None = None,
        debug: bool = False,
    ) -> None:
        self.reducer, self.probe, self.rules, self.measured, self.nbytes = reducer, probe, rules or Rules(), measured, nbytes
        self.tell = tell
        self.agreement = SameDecision("network/decision", debug, "network: the ranks decided differently in step {step}")
        self.base: Scheme = reducer.scheme
        groups = reducer.groups
        self.levels, self.names, self.sizes = len(groups.names), (*groups.names, "flat"), groups.sizes
        self.health = [Health(self.rules) for _ in self.names]
        self.rates, self.timer, self.tree = (
            GroupRates(groups.places),
            PhaseTimer(self.levels, None if probe is None else probe.busy_after),
            Tree(groups.places),
        )
        self.paths: dict[tuple[Ranks, int], Baseline] = {}
        self._recent: dict[tuple[Ranks, int], deque[float]] = {}
        self.links: dict[int, list[Finding]] = {}
        self.switches = 0
        self._asked = self._used = 0
        self._statistics: Statistics | None = None
        reducer.observers.append(self.timer)

    @property
    def adapted(self) -> bool:
        """Whether another scheme than that of good times is in use."""
        return self.reducer.scheme != self.base

    def share(self, statistics: Statistics) -> None:
        """Before the first step, on every rank: makes room for what the ranks tell each other."""
        statistics.add(ROWS, self.timer.size + 2, "gather")
        self.agreement.share(statistics)
        self._statistics = statistics

    def on_step_begin(self, step: int) -> None:
        """Decides from the numbers of the step before; on every rank, in order.

        Raises:
            LanewayError: ``share`` was not called, or (in debug mode) ranks decided differently in the step before.
        """
        statistics = self._shared()
        self.agreement.compare(statistics, step - 1)
        found = statistics.get(ROWS)
        if found is not None:
            self._decide(found.tolist())
        self.timer.take()  # what came since the last backward pass is no gradient's

    def on_backward_end(self, step: int) -> None:
        """Puts what this rank saw among the statistics of the step."""
        due, completed = (math.nan, -1) if self.probe is None else (float(self.probe.due), self.probe.completed)
        self._shared().put(ROWS, [*self.timer.take(), due, float(completed)])
        self.agreement.put(self._shared(), self.digest())

    def on_step_end(self, step: int, metrics: dict[str, Any]) -> None:
        """Adds to the metrics how much slower than in good times the slowest level is, where one is slow."""
        if slow := self.slow():
            metrics["network_slow"] = max(slow.values())

    def slow(self) -> dict[int, float]:
        """By level that is slow (the last: flat collectives): how much slower than in good times."""
        return {level: each.ratio for level, each in enumerate(self.health) if each.state != UP}

    def digest(self) -> int:
        """Of the decision in use: 48 bits."""
        return digest(repr((str(self.reducer.scheme), [(each.state, each.ratio) for each in self.health], self._asked)))

    def state_dict(self) -> dict[str, Any]:
        """What the next decision depends on; the same on every rank."""
        return {
            "places": list(self.tree.places.order),
            "scheme": self.reducer.scheme.to_dict(),
            "base": self.base.to_dict(),
            "health": [each.to_dict() for each in self.health],
            "rates": self.rates.to_list(),
            "paths": [[list(pair), way, each.values()] for (pair, way), each in self.paths.items()],
            "recent": [[list(pair), way, list(each)] for (pair, way), each in self._recent.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Undo of ``state_dict``; nothing, where ranks, levels or the scheme of good times were others."""
        if state["places"] != list(self.tree.places.order) or state["base"] != self.base.to_dict():
            return
        for each, given in zip(self.health, state["health"], strict=True):
            each.load(given)
        self.rates.load(state["rates"])
        for pair, way, values in state["paths"]:
            self._path((tuple(pair), way)).load(values)
        self._recent = {(tuple(pair), way): deque(values, RECENT) for pair, way, values in state["recent"]}
        kind = SchemeTable if "rows" in state["scheme"] else ReductionScheme
        self.reducer.set_scheme(kind.from_dict(state["scheme"]))

    def close(self, *, wait: bool = True) -> None:
        """End the probe's thread."""
        if self.probe is not None:
            self.probe.close(wait=wait)

    # -- from numbers that all ranks have

    def _decide(self, rows: Sequence[Sequence[float]]) -> None:
        ratios = self._passive(rows)
        round = self._round([row[-1] for row in rows])
        paths = {} if round is None else self._ratios(round)
        probing = self.probe is not None and min(row[-1] for row in rows) >= 0
        calm = not any(row[self.timer.size - 1] for row in rows)
        observed = self._observed(ratios, paths, probing, calm)
        changes = {}
        for level, (ratio, sure) in observed.items():
            if (change := self.health[level].observe(ratio, sure=sure)) is not None:
                changes[level] = change
        self._learn(rows if calm else (), ratios, round, paths)
        located = self._locate(ratios, paths, changes)
        if changes:
            self._recent.clear()
        self._switch(changes, located)
        if probing and self._used == self._asked and any(row[-2] == 1.0 for row in rows):
            assert self.probe is not None
            self._asked = self.probe.start()

    def _passive(self, rows: Sequence[Sequence[float]]) -> list[dict[Ranks, float]]:
        """By level: ratios of groups to their good times."""
        return self.rates.ratios([row[: self.timer.size] for row in rows])

    def _round(self, completed: Sequence[float]) -> Round | None:
        """The round that all ranks have completed since the last step."""
        if self.probe is None or self._used == self._asked or min(completed) < self._asked:
            return None
        self._used = self._asked
        return self.probe.result(self._asked)

    def _ratios(self, round: Round) -> dict[Ranks, float]:
        """Ratio of each pair to its good times, in its slower direction; nothing of those whose good times aren't known.

        What delays a transfer and is no link comes and goes: the fastest of the last rounds counts.
        """
        found: dict[Ranks, float] = {}
        for path in round.paths:
            both = []
            for way in (0, 1):
                recent = self._recent.setdefault((path.ranks, way), deque(maxlen=RECENT))
                recent.append(path.alpha_s + path.seconds[way])
                both.append(self._path((path.ranks, way)).ratio(min(recent)))
            if not any(math.isnan(ratio) for ratio in both):
                found[path.ranks] = max(both)
        return found

    def _observed(
        self, ratios: Sequence[Mapping[Ranks, float]], paths: Mapping[Ranks, float], probing: bool, calm: bool
    ) -> dict[int, tuple[float, bool]]:
        """By level, what counts, and whether it is sure: collectives in good times, otherwise the probe, where there is one."""
        pairs: list[dict[Ranks, float]] = [{} for _ in self.health]
        for pair, ratio in paths.items():
            pairs[self.tree.level(pair)][pair] = ratio
        usual = {pair: max(self._path((pair, way)).usual for way in (0, 1)) for pair in paths}
        groups = {group: baseline.usual for (level, group), baseline in self.rates.baselines.items() if level < self.levels}
        probes, collectives = _weighed(pairs, usual, self.sizes), _weighed(ratios, groups, self.sizes)
        found = {}
        for level, health in enumerate(self.health):
            passive, probed = collectives[level], probes[level]
            if level == self.levels:
                probed = max((each for each in probes if not math.isnan(each)), default=math.nan)
            if level == self.levels and health.state == UP:
                probed = math.nan  # a slow path is its own level's matter
            narrowed = passive * self._narrowed(level)
            if self.adapted and health.state == UP and narrowed >= self.rules.degraded:
                found[level] = (narrowed, False)  # slow in spite of the narrower wire
                continue
            own = not math.isnan(passive) if health.state == UP and not self.adapted else not probing
            found[level] = (passive, calm) if own else (probed, False)
        return found

    def _narrowed(self, level: int) -> float:
        """Bytes that a level's wire takes now over those of good times."""
        now, good = Step(self.reducer.scheme).main.levels, Step(self.base).main.levels
        return WIRE_SHARE[now[level].wire] / WIRE_SHARE[good[level].wire] if level < min(len(now), len(good)) else 1.0

    def _learn(
        self,
        rows: Sequence[Sequence[float]],
        ratios: Sequence[Mapping[Ranks, float]],
        round: Round | None,
        paths: Mapping[Ranks, float],
    ) -> None:
        """Good times are those in which nothing is suspicious."""
        up = [each.state == UP for each in self.health]
        if rows and not self.adapted:
            usual = [at and max(ratio.values(), default=0.0) < self.rules.severe for at, ratio in zip(up, ratios, strict=True)]
            self.rates.learn(rows, [level for level, good in enumerate(usual) if good])
        for path in () if round is None else round.paths:
            if all(up) and paths.get(path.ranks, 0.0) < self.rules.severe:
                for way in (0, 1):
                    self._path((path.ranks, way)).add(path.alpha_s + path.seconds[way])

    def _locate(
        self, ratios: Sequence[Mapping[Ranks, float]], paths: Mapping[Ranks, float], changes: Mapping[int, Change]
    ) -> dict[int, list[Finding]]:
        """By slow level, the links that were found now; pairs say more than groups."""
        seen: dict[Ranks, float] = dict(paths)
        if not paths:
            seen = {group: ratio for at in ratios[: self.levels] for group, ratio in at.items()}
        slow = [ranks for ranks, ratio in seen.items() if ratio >= self.rules.degraded]
        findings = locate(self.tree, slow, [ranks for ranks, ratio in seen.items() if ratio <= self.rules.restored])
        located = {}
        for level in range(self.levels + 1):
            if self.health[level].state == UP:
                self.links.pop(level, None)
            elif findings and (paths or level in changes) and findings != self.links.get(level):
                here = [finding for finding in findings if level == self.levels or finding.link.level <= level]
                if here and here != self.links.get(level):
                    located[level] = self.links[level] = here
        return located

    def _switch(self, changes: Mapping[int, Change], located: Mapping[int, list[Finding]]) -> None:
        before = self.reducer.scheme
        after = self._wanted() if changes else before
        if after != before:
            self._use(after)
        for level in sorted({*changes, *located}):
            change = changes.get(level) or Change(self.health[level].state, self.health[level].state, self.health[level].ratio)
            self._event(level, change, before, after)

    def _wanted(self) -> Scheme:
        slow = {min(level, self.levels - 1): ratio for level, ratio in sorted(self.slow().items(), reverse=True)}
        if self.levels > 1:
            slow.pop(0, None)  # inside a host, rounding takes longer than what it saves
        if not slow or (self.probe is None and Step(self.base).main.flat):
            return self.base
        drop = None not in (self.reducer.dropper, self.probe) and self.levels - 1 in slow
        steps = ladder(self.base, slow, self.levels, algorithms=self.measured is not None, drop=drop)
        return choose_step(steps, slow, self.sizes, measured=self.measured, nbytes=self.nbytes).scheme

    def _use(self, scheme: Scheme) -> None:
        released = _drops(self.reducer.scheme) and not _drops(scheme)
        self.reducer.set_scheme(scheme)
        dropper: Any = self.reducer.dropper
        if released and dropper is not None:
            dropper.release()
        self.switches += 1

    def _event(self, level: int, change: Change, before: Scheme, after: Scheme) -> None:
        if self.tell is not None:
            link = "; ".join(map(str, self.links.get(level, ()))) or self.names[level]
            schemes = {"from": str(before), "to": str(after)}
            state = {"state": change.after, "was": change.before, "ratio": round(change.ratio, 2)}
            self.tell("network", level=self.names[level], link=link, **state, **schemes)

    def _path(self, key: tuple[Ranks, int]) -> Baseline:
        return self.paths.setdefault(key, Baseline(learn=3))

    def _shared(self) -> Statistics:
        if self._statistics is None:
            raise LanewayError("network: the adapter needs statistics: call share() before the first step")
        return self._statistics


def _weighed(ratios: Sequence[Mapping[Ranks, float]], usual: Mapping[Ranks, float], sizes: Sequence[int]) -> list[float]:
    """By level, the largest ratio; 1 where a whole reduction hardly gets longer by it. NaN where nothing is known.

    Args:
        ratios: of groups or pairs, level by level; the last are those of flat collectives.
        usual: seconds of each for as many bytes, in good times.
        sizes: members of a group of each level.
    """
    bytes_of = [2 * (size - 1) / size / math.prod(sizes[:level]) for level, size in enumerate(sizes)]
    good = [max((usual[ranks] for ranks in at), default=0.0) * each for at, each in zip(ratios, bytes_of, strict=False)]
    found = []
    for level, at in enumerate(ratios):
        weighed = list(at.values())
        if level < len(sizes):
            more = {ranks: (ratio - 1) * usual[ranks] * bytes_of[level] for ranks, ratio in at.items()}
            weighed = [ratio if more[ranks] >= MATTERS * sum(good) else min(ratio, 1.0) for ranks, ratio in at.items()]
        found.append(max(weighed, default=math.nan))
    return found


def _drops(scheme: Scheme) -> bool:
    main = Step(scheme).main
    return bool(main.levels and main.levels[-1].drop)
