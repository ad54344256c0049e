"""Which pairs of ranks a probe measures, and which of them at the same time. No torch here."""

from __future__ import annotations

from collections.abc import Sequence

from laneway.cluster.probe.locate import Link, Tree

__all__ = ["busiest", "pairs", "slots"]

Pair = tuple[int, int]


def pairs(tree: Tree) -> tuple[Pair, ...]:
    """Pairs that pass every link: at each level neighbours on a ring of members, all ranks of them at the innermost two levels
    that join anything, further out two of each."""
    found: list[Pair] = []
    inside: list[tuple[int, ...]] = [(rank,) for rank in tree.places.order]
    joined = 0
    for wholes in tree.wholes:
        joins = False
        for whole in wholes:
            members = [member for member in inside if set(member) <= set(whole)]
            joins = joins or len(members) > 1
            found += _ring(members, joined >= 2)
        joined += joins
        inside = list(wholes)
    return tuple(dict.fromkeys(found))


def _ring(members: Sequence[tuple[int, ...]], few: bool) -> list[Pair]:
    count = len(members)
    found: list[Pair] = []
    for index in range(count if count > 2 else count - 1):
        one, other = members[index], members[(index + 1) % count]
        seats = range(max(len(one), len(other)))
        for seat in (seats[0], seats[-1]) if few and len(seats) > 1 else seats:
            found.append((one[seat % len(one)], other[seat % len(other)]))
    return found


def slots(tree: Tree, wanted: Sequence[Pair]) -> tuple[tuple[int, ...], ...]:
    """Indices of pairs, slot by slot: those of one slot share no link and no rank, so that each has its links to itself."""
    found: list[tuple[list[int], set[Link | int]]] = []
    for index, pair in enumerate(wanted):
        passed: set[Link | int] = {*tree.links(pair), *pair}
        for numbers, taken in found:
            if not taken & passed:
                numbers.append(index)
                taken |= passed
                break
        else:
            found.append(([index], passed))
    return tuple(tuple(numbers) for numbers, _ in found)


def busiest(tree: Tree, wanted: Sequence[Pair]) -> int:
    """How many of the pairs pass the link that most of them pass."""
    counts: dict[Link, int] = {}
    for pair in wanted:
        for link in tree.links(pair):
            counts[link] = counts.get(link, 0) + 1
    return max(counts.values(), default=0)
