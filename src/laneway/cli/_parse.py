"""tyro parses and documents the flags; this file keeps the house's promise about errors: exit code 2 and one line."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tyro

from laneway.cli._lists import LISTS, with_dashes
from laneway.core import LanewayError

T = TypeVar("T")


class UsageError(LanewayError):
    """Flags that could not be parsed."""

    exit_code = 2


def parse(target: Callable[..., T] | type[T], args: Sequence[str], prog: str, **options: Any) -> T:
    """``tyro.cli`` whose parse errors come as one-line UsageError; ``--help`` still prints and exits 0."""
    caught = io.StringIO()
    try:
        with contextlib.redirect_stderr(caught):
            return tyro.cli(target, args=with_dashes(args), prog=prog, registry=LISTS, **options)
    except SystemExit as exit_:
        if exit_.code in (0, None):
            raise
        raise UsageError(_one_line(caught.getvalue())) from None


def _one_line(box: str) -> str:
    """The text of tyro's error box without the frame and the pointer to --help."""
    lines = [re.sub(r"^[│|]\s?|\s*[│|]$", "", line).strip() for line in box.splitlines()]
    kept = []
    for line in lines:
        if line.startswith("For full helptext"):
            break
        if line and not re.match(r"^[╭╰─+]", line):
            kept.append(line)
    return " ".join(kept) or "bad flags; see --help"
