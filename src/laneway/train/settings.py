"""Configurations as TOML and back: merging with type checks and suggestions, writing, and what differs between two.

Works on any nested frozen dataclass, so that a new field needs no word here. A field is named by its dotted path.
"""

from __future__ import annotations

import dataclasses
import tomllib
import typing
from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar

import tomli_w

from laneway.core import InputError, nearest, typed

T = TypeVar("T")


def read_toml(path: str | Path, field: str = "config") -> dict[str, Any]:
    """The nested mapping in a TOML file; raises InputError where there is none or where it is no TOML."""
    path = Path(path)
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise InputError(field, str(path), "a TOML file that can be read", error.strerror) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(field, str(path), "a TOML file", str(error)) from error


def merge(base: T, mapping: Mapping[str, Any]) -> tuple[T, list[InputError]]:
    """``base`` with the fields of ``mapping`` in place of its own, and everything in ``mapping`` that did not fit.

    A field that did not fit keeps the value it has in ``base``.
    """
    return _merge(base, mapping, "")


def _merge(base: Any, mapping: Mapping[str, Any], prefix: str) -> tuple[Any, list[InputError]]:
    hints = typing.get_type_hints(type(base))
    changes: dict[str, Any] = {}
    found: list[InputError] = []
    for key, value in mapping.items():
        name = f"{prefix}{key}"
        if key not in hints:
            found.append(_unknown(name, key, value, hints))
        elif dataclasses.is_dataclass(current := getattr(base, key)):
            if isinstance(value, Mapping):
                changes[key], inner = _merge(current, value, f"{name}.")
                found += inner
            else:
                found.append(InputError(name, value, f"a table [{name}]"))
        else:
            try:
                changes[key] = typed(name, value, hints[key])
            except InputError as error:
                found.append(error)
    return _replace(base, changes, found), found


def _replace(base: Any, changes: dict[str, Any], found: list[InputError]) -> Any:
    """``dataclasses.replace``, field by field: a class that refuses a value as it is made loses that field only."""
    for key, value in changes.items():
        try:
            base = dataclasses.replace(base, **{key: value})
        except InputError as error:
            found.append(error)
    return base


def _unknown(name: str, key: str, value: Any, known: Mapping[str, Any]) -> InputError:
    close = nearest(key, known)
    return InputError(name, value, "one of the fields " + ", ".join(known), close and f"did you mean {close!r}?")


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """Every field by its dotted name."""
    flat: dict[str, Any] = {}
    for item in dataclasses.fields(config):
        value, name = _common(getattr(config, item.name)), f"{prefix}{item.name}"
        if dataclasses.is_dataclass(value):
            flat |= flatten(value, f"{name}.")
        else:
            flat[name] = value
    return flat


def differences(old: T, new: T) -> dict[str, tuple[Any, Any]]:
    """The fields in which two configurations of one type differ, as name → (old, new)."""
    before, after = flatten(old), flatten(new)
    return {name: (before[name], after[name]) for name in before if before[name] != after[name]}


def to_toml(config: Any) -> str:
    """The configuration as TOML, fields in their order; fields that are None are left out."""
    return tomli_w.dumps(_plain(config))


def _plain(config: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    tables: dict[str, Any] = {}
    for item in dataclasses.fields(config):
        value = _common(getattr(config, item.name))
        if dataclasses.is_dataclass(value):
            tables[item.name] = _plain(value)
        elif value is not None:
            plain[item.name] = list(value) if isinstance(value, tuple) else value
    return plain | tables


def _common(value: Any) -> Any:
    """A field's value as a file gives it back: numbers of other libraries as Python's, a list as a tuple."""
    if isinstance(value, list | tuple):
        return tuple(map(_common, value))
    return float(value) if isinstance(value, Real) and not isinstance(value, int | float) else value
