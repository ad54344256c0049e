"""The vocabulary that all parts share: errors, choices and the step's extension protocol. No torch here."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Callable, Iterable
from contextlib import suppress
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


def choices(field: str, given: Iterable[str], options: Iterable[str]) -> tuple[str, ...]:
    """Return ``given`` if it has one or more of ``options`` and nothing else; otherwise raise an InputError."""
    options = list(options)
    given = given if isinstance(given, str) else tuple(given)
    if isinstance(given, str) or not given:
        raise InputError(field, given or "", "a list with one or more of " + ", ".join(options))
    return tuple(choice(field, name, options) for name in given)


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


_WORDS = {int: "an integer", float: "a number", str: "a text", bool: "true or false", types.NoneType: "nothing"}


def typed(field: str, given: object, hint: Any) -> Any:
    """Return ``given`` as the annotated type; otherwise raise an InputError.

    An integer is a number too, and a list may stand for a tuple; true and false are no integers.
    """
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union else (hint,)
    for option in options:
        if option is float and isinstance(given, Real) and not isinstance(given, bool):
            with suppress(OverflowError):  # an integer that no float holds
                return float(given)
            continue
        if typing.get_origin(option) is tuple and isinstance(given, list | tuple):
            item = typing.get_args(option)[0]
            return tuple(typed(f"{field}[{index}]", part, item) for index, part in enumerate(given))
        if isinstance(option, type) and isinstance(given, option) and not (option is int and isinstance(given, bool)):
            return given
    raise InputError(field, given, " or ".join(_word(option) for option in options if option is not types.NoneType))


def _word(option: Any) -> str:
    return _WORDS.get(option, option.__name__ if dataclasses.is_dataclass(option) else "a list")


def wrong_types(config: Any, prefix: str = "") -> dict[str, InputError]:
    """Of a dataclass: an error for each field, by its name, that holds another type than it is declared with."""
    hints, found = typing.get_type_hints(type(config)), {}
    for field in dataclasses.fields(config):
        try:
            typed(f"{prefix}{field.name}", getattr(config, field.name), hints[field.name])
        except InputError as error:
            found[field.name] = error
    return found


def problems_of(config: Any, prefix: str, check: Callable[[Any], list[InputError]]) -> list[InputError]:
    """One error a field of a dataclass: that it holds another type than it is declared with, and what ``check`` finds.

    The other fields are checked beside the defaults of those. Names of fields begin with ``prefix``.
    """
    wrong = wrong_types(config, prefix)
    defaults = {field.name: _default(field) for field in dataclasses.fields(config) if field.name in wrong}
    sound = dataclasses.replace(config, **defaults) if wrong else config
    told = [_in_words(error, dataclasses.replace(sound, **{name: getattr(config, name)}), check) for name, error in wrong.items()]
    known = {f"{prefix}{name}" for name in wrong}
    return told + [error for error in check(sound) if error.field not in known]


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _in_words(error: InputError, config: Any, check: Callable[[Any], list[InputError]]) -> InputError:
    """What ``check`` says of that field, which is more than its type, where it gets that far."""
    with suppress(TypeError, ValueError, AttributeError):
        same = (told for told in check(config) if told.field == error.field and told.given is error.given)
        return next(same, error)
    return error


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
