"""Lists of hosts as Slurm writes them: node[001-004,7],gpu-a[1-2]b[3-4],login1."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product

from laneway.core import InputError

__all__ = ["expand_hosts"]

ACCEPTED = "host names separated by commas, with ranges in brackets: node[001-004,7],login1"
MOST = 100_000
_TERM = re.compile(r"(?:[^\s,\[\]]|\[[^\[\]]*\])+")


def expand_hosts(text: str, field: str = "hosts") -> tuple[str, ...]:
    """Every name of the list, in its order; numbers keep their leading zeros.

    Raises:
        InputError: not such a list, or one of more than a hundred thousand names.
    """
    names: list[str] = []
    for term in _terms(text, field):
        for name in _expand(term, text, field):
            names.append(name)
            if len(names) > MOST:
                raise InputError(field, text[:120], f"at most {MOST} hosts")
    return tuple(names)


def _terms(text: str, field: str) -> Iterator[str]:
    at = 0
    while True:
        found = _TERM.match(text, at)
        if found is None:
            raise InputError(field, text[:120], ACCEPTED, f"a name is missing at character {at + 1}")
        yield found[0]
        if found.end() == len(text):
            return
        if text[found.end()] != ",":
            raise InputError(field, text[:120], ACCEPTED, f"unexpected {text[found.end()]!r} at character {found.end() + 1}")
        at = found.end() + 1


def _expand(term: str, text: str, field: str) -> Iterator[str]:
    pieces = re.split(r"\[([^\]]*)\]", term)
    choices = [[piece] if index % 2 == 0 else _numbers(piece, text, field) for index, piece in enumerate(pieces)]
    return ("".join(words) for words in product(*choices))


def _numbers(ranges: str, text: str, field: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        found = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", part, re.ASCII)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if found is None or last < first:
            raise InputError(field, text[:120], ACCEPTED, f"[{part}] is no range of numbers")
        if last - first >= MOST:
            raise InputError(field, text[:120], f"at most {MOST} hosts")
        numbers += [str(number).zfill(len(found[1])) for number in range(first, last + 1)]
    return numbers
