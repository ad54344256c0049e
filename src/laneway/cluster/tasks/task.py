"""What there is to run: a cost, places, where the data lie, the level that a kernel wants. No torch here."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from laneway.cluster.tasks.members import Members, Place
from laneway.core import InputError, choice, positive_int

__all__ = ["KINDS", "Task", "prefers"]

KINDS = ("compute", "aggregation", "checkpoint", "preprocessing", "kernel")
Function = TypeVar("Function", bound=Callable[..., Any])
_LEVEL = "_laneway_level"
_warned: set[str] = set()


def prefers(*, level: str) -> Callable[[Function], Function]:
    """Decorator: the function, a custom kernel say, is best run without going beyond ``level`` from its data.

    A task made of it is placed further out only where that is cheaper by the scheduler's factor ``stray``.

    Raises:
        InputError: no name.
    """
    if not isinstance(level, str) or not level:
        raise InputError("level", level, "the name of a level, such as L1")

    def mark(function: Function) -> Function:
        setattr(function, _LEVEL, level)
        return function

    return mark


@dataclass(frozen=True)
class Task:
    """Work that has to be done in a step, in one of several places.

    Attributes:
        name: among the tasks of a scheduler.
        kind: one of `KINDS`.
        places: where it can run; see `Members.ones`, `Members.groups`, `Members.everyone`.
        run: called with the chosen place, on its ranks.
        seconds: of work on an idle member; 0 where it is not known: it is measured then.
        home: the rank at which its data lie; None: everywhere.
        nbytes: of data that go from there to the ranks of another place.
        traffic: for each variant, the bytes that a rank sends over each level.
        level: it is best run without going beyond this level from its data; by default what `prefers` says of ``run``.
        every: it is due in steps that this divides.

    Raises:
        InputError: a value out of range, or a place that is not there.
    """

    name: str
    kind: str
    places: tuple[Place, ...]
    run: Callable[[Place], Any]
    seconds: float = 0.0
    home: int | None = None
    nbytes: float = 0.0
    traffic: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    level: str = ""
    every: int = 1

    def __post_init__(self) -> None:
        choice("kind", self.kind, KINDS)
        positive_int("every", self.every)
        for name in ("seconds", "nbytes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise InputError(name, value, "a number ≥ 0")
        object.__setattr__(self, "places", tuple(self.places))
        names = [place.name for place in self.places]
        if not names or len(set(names)) != len(names) or not all(place.ranks for place in self.places):
            raise InputError("places", names, f"at least one place with ranks for task {self.name!r}, each name once")
        for variant in self.traffic:
            choice("traffic", variant, [place.variant for place in self.places])
        if not self.level:
            object.__setattr__(self, "level", getattr(self.run, _LEVEL, ""))
        if self.kind == "kernel" and not self.level:
            _warn(self.run)

    def check(self, members: Members) -> None:
        """Raises InputError where the task does not fit the ranks and levels that there are."""
        if self.level:
            members.level(self.level)
        for levels in self.traffic.values():
            for level in levels:
                members.level(level)
        for rank in (rank for place in self.places for rank in place.ranks):
            _check_rank("places", rank, members)
        if self.home is not None:
            _check_rank("home", self.home, members)

    def place(self, name: str) -> Place:
        """The place of that name."""
        return next(place for place in self.places if place.name == name)

    def due(self, step: int) -> bool:
        """Whether the task is to run in a step."""
        return step % self.every == 0

    @property
    def declared(self) -> bool:
        """Whether anything is known of the cost before it has run."""
        return bool(self.seconds or self.nbytes or self.traffic)


def _check_rank(field: str, rank: object, members: Members) -> None:
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < members.world:
        raise InputError(field, rank, f"ranks from 0 to {members.world - 1}")


def _warn(run: Callable[..., Any]) -> None:
    name = f"{getattr(run, '__module__', '')}.{getattr(run, '__qualname__', repr(run))}"
    if name not in _warned:
        _warned.add(name)
        warnings.warn(
            f"the kernel {name} names no level; it may be run anywhere. Say where it is best with @prefers(level='L1')",
            stacklevel=4,
        )
