"""What a slow level is answered with: other algorithms, narrower wires, in the end dropping. No torch here.

A ladder begins with the scheme of good times. Each further step puts fewer bytes on the slow level and on those outside of it,
and costs more: processors' time, then rounding, then gradients that come late. The mildest step that makes up for it is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from laneway.cluster.costs.curves import Curve
from laneway.cluster.costs.measured import WIRE_SHARE, MeasuredNetwork, predict
from laneway.cluster.reduce.scheme import WIRES, LevelScheme, ReductionScheme, SchemeTable
from laneway.core import InputError

__all__ = ["DROP", "Scheme", "Step", "choose_step", "ladder", "link_load", "slowed"]

Scheme = ReductionScheme | SchemeTable
DROP = 0.9
"""Share that the last step leaves at home."""
CHUNK = 2 * 2**20
ENOUGH = 1.15
"""A reduction that takes no longer than so many times its good time needs no stronger medicine."""
NEARLY = 1.1
"""Where none is enough: the mildest of those that take no longer than so many times the fastest."""


@dataclass(frozen=True)
class Step:
    """One step of a ladder.

    Attributes:
        scheme: to reduce by.
    """

    scheme: Scheme

    @property
    def main(self) -> ReductionScheme:
        """Its part for large vectors."""
        return self.scheme.rows[-1][1] if isinstance(self.scheme, SchemeTable) else self.scheme


def ladder(base: Scheme, slow: Iterable[int], levels: int, *, algorithms: bool = False, drop: bool = False) -> list[Step]:
    """Schemes for slow levels, the mildest first.

    Args:
        base: of good times.
        slow: levels; what changes are they, and those outside of the innermost of them that leaves a host: its link carries them.
        levels: of the groups.
        algorithms: also with other algorithms at the slow levels.
        drop: whether the outermost level may drop.
    """
    wide = set(slow)
    wide |= set(range(min((level for level in wide if level), default=levels), levels))
    found = [base]
    exact = [base]
    if Step(base).main.flat:
        exact = [_each(base, lambda _: ReductionScheme((LevelScheme(),) * levels, CHUNK))]
        found += exact
    if algorithms:
        found += [
            _each(exact[-1], lambda scheme, name=name: _algorithm(scheme, wide, name)) for name in ("all_to_all", "ring", "tree")
        ]
    for wire in WIRES[1:]:
        found.append(_each(exact[-1], lambda scheme, wire=wire: _narrower(scheme, wide, wire)))
    if drop:
        found.append(_each(exact[-1], lambda scheme: _dropping(_narrower(scheme, wide, "bf16"))))
    return [Step(scheme) for scheme in dict.fromkeys(found)]


def link_load(scheme: ReductionScheme, sizes: Sequence[int], level: int) -> float:
    """Bytes that leave one member of a level, per byte of the vector.

    Args:
        scheme: of a reduction.
        sizes: members of a group of each level.
        level: whose members: 0 for ranks, 1 for hosts.
    """
    if scheme.flat:
        world = math.prod(sizes)
        return 2 * (world - 1) / world
    total, share = 0.0, 1.0
    for size, part in zip(sizes[level:], scheme.levels[level:], strict=True):
        total += share * 2 * (size - 1) / size * WIRE_SHARE[part.wire] * (1 - part.drop)
        share /= size
    return total


def slowed(network: MeasuredNetwork, ratios: Mapping[int, float]) -> MeasuredNetwork:
    """The network with some levels slower by a factor; flat collectives are as slow as the slowest of them."""
    most = max(ratios.values(), default=1.0)
    top = ratios.get(len(network.levels) - 1, 1.0)
    levels = tuple(_slower(curve, ratios.get(level, 1.0)) for level, curve in enumerate(network.levels))
    dropping = {key: _slower(curve, top) for key, curve in network.dropping.items()}
    return replace(network, levels=levels, flat=_slower(network.flat, most), dropping=dropping)


def choose_step(
    steps: Sequence[Step],
    ratios: Mapping[int, float],
    sizes: Sequence[int],
    *,
    measured: MeasuredNetwork | None = None,
    nbytes: float = 16 * 2**20,
) -> Step:
    """The mildest step that makes up for slow levels, or the mildest of the best.

    Args:
        steps: of a ladder; the first is that of good times.
        ratios: by slow level: how much slower it is.
        sizes: members of a group of each level.
        measured: predicts seconds of vectors of ``nbytes``; without it, bytes on the slow levels count.
        nbytes: of a usual vector.
    """
    if measured is None:
        costs = [
            max(
                ratio * link_load(step.main, sizes, level) / link_load(steps[0].main, sizes, level)
                for level, ratio in ratios.items()
            )
            for step in steps
        ]
        return _mildest(steps, costs, ENOUGH)
    good = predict(measured, steps[0].main, nbytes)
    slow = slowed(measured, ratios)
    return _mildest(steps, [_predicted(slow, step.main, nbytes) for step in steps], ENOUGH * good)


def _mildest(steps: Sequence[Step], costs: Sequence[float], enough: float) -> Step:
    limit = max(enough, NEARLY * min(costs))
    return next(step for step, cost in zip(steps, costs, strict=True) if cost <= limit)


def _predicted(network: MeasuredNetwork, scheme: ReductionScheme, nbytes: float) -> float:
    try:
        return predict(network, scheme, nbytes)
    except InputError:  # a drop rate that was not measured
        return math.inf


def _slower(curve: Curve, ratio: float) -> Curve:
    more = (ratio - 1) * curve.per_byte
    return Curve(curve.start, curve.per_byte + more, tuple((size, seconds + more * size) for size, seconds in curve.points))


def _each(scheme: Scheme, change: Callable[[ReductionScheme], ReductionScheme]) -> Scheme:
    """Change the parts of a table that go over levels; small vectors go as they went."""
    if isinstance(scheme, ReductionScheme):
        return change(scheme)
    last = len(scheme.rows) - 1
    rows = [(bound, change(each) if index == last or not each.flat else each) for index, (bound, each) in enumerate(scheme.rows)]
    return SchemeTable(tuple(rows))


def _algorithm(scheme: ReductionScheme, levels: Container[int], name: str) -> ReductionScheme:
    return _changed(scheme, levels, lambda part: replace(part, algorithm=name, dims=()))


def _narrower(scheme: ReductionScheme, levels: Container[int], wire: str) -> ReductionScheme:
    return _changed(scheme, levels, lambda part: replace(part, wire=max(part.wire, wire, key=WIRES.index)))


def _changed(scheme: ReductionScheme, levels: Container[int], change: Callable[[LevelScheme], LevelScheme]) -> ReductionScheme:
    parts = [change(part) if level in levels else part for level, part in enumerate(scheme.levels)]
    return replace(scheme, levels=tuple(parts))


def _dropping(scheme: ReductionScheme) -> ReductionScheme:
    parts = scheme.levels
    return replace(scheme, levels=(*parts[:-1], replace(parts[-1], drop=max(parts[-1].drop, DROP))))
