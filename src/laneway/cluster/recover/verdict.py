"""Who is lost: decided from what one rank sees of the others. No store, no sockets, no clock here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

__all__ = ["Call", "Limits", "Sighting", "Verdict", "judge", "suspects"]


@dataclass(frozen=True)
class Limits:
    """Seconds: how often a rank shows itself, and after how long without a sign it is lost."""

    limit: float

    @property
    def beat(self) -> float:
        """Ten in a limit, and at least one a second."""
        return min(self.limit / 10, 1.0)

    @property
    def late(self) -> float:
        """A sign that is missing for so long makes us ask whether the process exists."""
        return 3 * self.beat

    @property
    def fence(self) -> float:
        """Out of contact for so long a rank gives up by itself: before the others, at ``limit``, go on without it."""
        return 0.75 * self.limit


@dataclass(frozen=True)
class Sighting:
    """One member as seen from here. ``age``: seconds since its sign last changed, ``looks``: how often we looked since."""

    age: float
    looks: int
    answered: bool = False
    left: bool = False


@dataclass(frozen=True)
class Call:
    """A roll call: a rank had an error and wants to know who is here."""

    by: int
    text: str

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Verdict:
    """What all ranks are told. ``lost``: idents; none: rank ``by`` failed while all were here. ``why``: in words."""

    lost: tuple[int, ...]
    by: int
    why: str
    gone: tuple[int, ...] = field(default=())

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Verdict:
        """Undo of ``to_json``."""
        found = json.loads(text)
        return cls(tuple(found["lost"]), found["by"], found["why"], tuple(found["gone"]))


def suspects(seen: Mapping[int, Sighting], call: Call | None, limits: Limits) -> list[int]:
    """Whom to ask whether they exist: those that don't answer a roll call, and all that are late where one is very late."""
    here = {ident: sighting for ident, sighting in seen.items() if not sighting.left}
    if call is not None:
        return [ident for ident, sighting in here.items() if not sighting.answered]
    if not any(sighting.age >= limits.late for sighting in here.values()):
        return []
    return [ident for ident, sighting in here.items() if sighting.age >= 2 * limits.beat]


def judge(
    me: int, seen: Mapping[int, Sighting], gone: Sequence[int], asked: Sequence[int], call: Call | None, limits: Limits
) -> Verdict | None:
    """The verdict, or None where it is too early for one.

    Args:
        me: ident of the rank that looks.
        seen: the members of the present world.
        gone: those of ``asked`` whose processes surely exist no more.
        asked: what ``suspects`` named.
        call: the roll call under way, if any.
        limits: how long to wait.
    """
    silent = [ident for ident, s in seen.items() if not s.left and s.age >= limits.limit and s.looks >= 4]
    if not silent and not (gone and set(gone) == set(asked)):
        if call is not None and not asked:
            return Verdict((), call.by, call.text)
        return None
    if silent:  # what is nearly as late went down with them
        silent = [ident for ident, s in seen.items() if not s.left and s.age >= limits.limit - 2 * limits.beat]
    lost = tuple(sorted({*silent, *gone}))
    why = "its process is gone" if set(gone) == set(lost) else f"no sign of life for {limits.limit:g} s (frozen, or cut off)"
    return Verdict(lost, me, why if len(lost) == 1 else why.replace("its process is", "their processes are"), tuple(gone))
