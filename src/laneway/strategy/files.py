"""Nested frozen dataclasses as plain dictionaries (for JSON and TOML) and back, with errors that name the field."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar, cast

from laneway.core import InputError, choice, nearest

T = TypeVar("T")


def to_plain(value: Any) -> Any:
    """Dataclasses as dictionaries, tuples as lists; what is None is left out, since TOML has no word for it."""
    if dataclasses.is_dataclass(value):
        pairs = ((item.name, getattr(value, item.name)) for item in dataclasses.fields(value))
        return {name: to_plain(part) for name, part in pairs if part is not None}
    if isinstance(value, Mapping):
        return {name: to_plain(part) for name, part in value.items() if part is not None}
    if isinstance(value, tuple | list):
        return [to_plain(part) for part in value]
    return value


def from_plain(kind: type[T], data: Any, field: str) -> T:
    """Undo of ``to_plain``.

    Raises:
        InputError: an unknown, missing or wrong field, by its dotted name.
    """
    items = dataclasses.fields(cast(Any, kind))
    if not isinstance(data, Mapping):
        raise InputError(field, data, "a table of " + ", ".join(item.name for item in items))
    hints = typing.get_type_hints(kind)
    for name, value in data.items():
        if name not in hints:
            close = nearest(name, hints)
            raise InputError(f"{field}.{name}", value, "one of " + ", ".join(hints), close and f"did you mean {close!r}?")
    for item in items:
        needed = item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
        if needed and item.name not in data:
            raise InputError(f"{field}.{item.name}", None, "a value: this field is missing")
    return kind(**{name: _part(hints[name], value, f"{field}.{name}") for name, value in data.items()})


def _part(hint: Any, value: Any, field: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return from_plain(cast(type, hint), value, field)
    if origin in (types.UnionType, typing.Union):
        inner = [each for each in arguments if each is not type(None)]
        return _part(inner[0], value, field)
    if origin is typing.Literal:
        return choice(field, value, arguments)
    if origin is tuple and isinstance(value, list | tuple):
        kinds = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else list(arguments)
        if len(kinds) == len(value):
            return tuple(_part(kind, part, f"{field}[{at}]") for at, (kind, part) in enumerate(zip(kinds, value, strict=True)))
    elif origin is dict and isinstance(value, Mapping):
        return {str(name): _part(arguments[1], part, f"{field}.{name}") for name, part in value.items()}
    elif hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    elif isinstance(hint, type) and isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    raise InputError(field, value, f"a value of type {getattr(hint, '__name__', hint)}")
