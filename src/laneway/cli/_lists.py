"""Lists on the command line: values between commas, between spaces, or both."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, get_args

from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

WORDS: dict[Any, str] = {str: "names", int: "integers", float: "numbers"}
LISTS = ConstructorRegistry()


def values(words: Sequence[str]) -> list[str]:
    """The values in the words of an option: ``a,b``, ``a b`` and ``a, b`` are the same."""
    return [value for word in words for part in word.split(",") if (value := part.strip())]


def joined(parts: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """The parts; where some in a row, joined by commas, make one of the known names, which may have commas, that name."""
    found, rest = [], list(parts)
    while rest:
        length = next((n for n in range(len(rest), 1, -1) if ", ".join(rest[:n]) in known), 1)
        found.append(", ".join(rest[:length]))
        rest = rest[length:]
    return tuple(found)


def with_dashes(args: Sequence[str]) -> list[str]:
    """The words, where one that begins as a negative number and is none ("-40% bf16") is joined to the option it belongs to."""
    found: list[str] = []
    for word in args:
        if found and re.match(r"-\d", word) and not re.fullmatch(r"-[\d.e+-]+", word):
            found[-1] += ("=" if re.fullmatch(r"--[^=]+", found[-1]) else ",") + word
        else:
            found.append(word)
    return found


@LISTS.primitive_rule
def _tuple_rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[tuple[Any, ...]] | None:
    """``tuple[T, ...]`` and ``tuple[T, T]`` of names or numbers."""
    parts = get_args(info.type)
    kind: Any = parts[0] if info.type_origin is tuple and parts else None
    if kind not in WORDS or not set(parts) <= {kind, ...}:
        return None
    length = None if ... in parts else len(parts)
    name = kind.__name__.upper()
    return PrimitiveConstructorSpec(
        nargs="*",
        metavar=f"[{name} [{name} ...]]" if length is None else " ".join([name] * length),
        instance_from_str=lambda words: _parsed(words, kind, length),
        is_instance=lambda given: isinstance(given, tuple) and all(isinstance(value, kind) for value in given),
        str_from_instance=lambda given: [str(value) for value in given],
    )


def _parsed(words: Sequence[str], kind: Any, length: int | None) -> tuple[Any, ...]:
    given = values(words)
    accepted = WORDS[kind] if length is None else f"{length} {WORDS[kind]}"
    if length not in (None, len(given)):
        raise ValueError(f"got {','.join(given)!r}; accepted: {accepted}")
    return tuple(_one(value, kind, accepted) for value in given)


def _one(value: str, kind: Any, accepted: str) -> Any:
    try:
        return kind(value)
    except ValueError:
        raise ValueError(f"got {value!r}; accepted: {accepted}") from None
