"""The vocabulary that all parts share: errors, choices and the step's extension protocol. No torch here."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any, Protocol, runtime_checkable


class LanewayError(Exception):
    """Something a user can act on. The command line prints it as one line and exits with 2 (bad input) or 1 (a failed run)."""

    exit_code = 1


class InputError(LanewayError, ValueError):
    """Bad input: names the field, what was given and what is accepted.

    Args:
        field: dotted name of the field, as in the configuration file or the call (``model.streams``).
        given: the value that was given.
        accepted: what would be accepted, in words ("an integer ≥ 1").
        hint: optional further help, a full clause ("did you mean 'sinkhorn'?").
    """

    exit_code = 2

    def __init__(self, field: str, given: object, accepted: str, hint: str | None = None) -> None:
        self.field, self.given, self.accepted, self.hint = field, given, accepted, hint
        super().__init__(f"{field}: got {given!r}; accepted: {accepted}" + (f"; {hint}" if hint else ""))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.field, self.given, self.accepted, self.hint)


def nearest(word: str, options: Iterable[str]) -> str | None:
    """The option spelled most like ``word``, or None where nothing is close."""
    found = difflib.get_close_matches(str(word).lower(), list(options), n=1, cutoff=0.5)
    return found[0] if found else None


def choice(field: str, given: object, options: Iterable[str]) -> str:
    """Return ``given`` if it is one of ``options``; otherwise raise an InputError that suggests the nearest."""
    options = list(options)
    if isinstance(given, str) and given in options:
        return given
    close = nearest(str(given), options)
    raise InputError(field, given, "one of " + ", ".join(options), f"did you mean {close!r}?" if close else None)


# What memory that could not be had was asked for, as torch, numpy and the counting allocator tell it: (number, unit).
ASKED_MEMORY = re.compile(r"(?:tried to allocate|unable to allocate|wanted)\s+([\d.]+)\s*(bytes|[KMGT]iB|B)\b", re.IGNORECASE)


def positive_int(field: str, given: object, at_least: int = 1) -> int:
    """Return ``given`` if it is an integer ≥ ``at_least``; otherwise raise an InputError."""
    if isinstance(given, bool) or not isinstance(given, int) or given < at_least:
        raise InputError(field, given, f"an integer ≥ {at_least}")
    return given


def real(field: str, given: object, fine: Callable[[float], bool], accepted: str) -> float:
    """Return ``given`` as a float if it is a finite number for which ``fine`` holds; otherwise raise an InputError."""
    if isinstance(given, bool) or not isinstance(given, Real) or not math.isfinite(given) or not fine(float(given)):
        raise InputError(field, given, accepted)
    return float(given)


def collect(checks: Iterable[Callable[[], object]]) -> list[InputError]:
    """Run every check; return the errors of those that raised one."""
    found: list[InputError] = []
    for check in checks:
        try:
            check()
        except InputError as error:
            found.append(error)
    return found


@runtime_checkable
class Extension(Protocol):
    """What may take part in a training step. The loop holds a list of these and knows none by name.

    Calls come in this order in every optimizer step: ``on_step_begin``, (forward and backward of each micro-batch),
    ``on_backward_end`` (gradients complete and reduced, not yet clipped), ``on_step_end`` (parameters updated; ``metrics``
    may be added to). ``state_dict`` must hold all that an exact resume needs.
    """

    def on_step_begin(self, step: int) -> None:
        """Before the first micro-batch of optimizer step ``step``."""

    def on_backward_end(self, step: int) -> None:
        """After the last backward of the step, before clipping."""

    def on_step_end(self, step: int, metrics: dict[str, Any]) -> None:
        """After the optimizer; scalars added to ``metrics`` end in the step's metrics row."""

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on exactly."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo of ``state_dict``."""


class Statistics(Protocol):
    """Named vectors of fixed size that all ranks reduce together, once a step, in one collective.

    ``values`` are numbers or a tensor; what ``get`` returns is a tensor, None before the first step has ended.
    """

    def add(self, name: str, size: int = 1, op: str = "sum") -> None:
        """Make room for ``size`` numbers, reduced by ``op``: ``sum``, ``max`` or ``gather``."""

    def put(self, name: str, values: Any) -> None:
        """This rank's values in the step that is under way."""

    def get(self, name: str) -> Any:
        """The reduced values of the last step: [size], or of ``gather`` [ranks, size]."""


@runtime_checkable
class SharesStatistics(Protocol):
    """An extension that has numbers to share: its vectors ride along with what the loop reduces anyway."""

    def share(self, statistics: Statistics) -> None:
        """Once, before the first step and before any state is loaded, on every rank alike: add vectors, keep the object.

        What is put before the step's ``on_backward_end`` is over comes back, reduced, in the next ``on_step_begin``.
        """
