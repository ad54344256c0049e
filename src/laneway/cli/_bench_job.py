"""What `laneway bench NAME` is about to do, once its arguments are checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Job:
    """The work, given where to tell progress; whether JSON is wanted; where to save ("" for the checkout), or None."""

    work: Callable[[Callable[[str], None]], Any]
    json: bool
    save: str | None


def job_of(bench: Any, options: Any, quick: bool, json: bool, save: str | None) -> Job:
    """A benchmark's module with its options, checked, and made quick where that was asked for."""
    options.check()
    chosen = bench.quick(options) if quick else options
    return Job(lambda progress: bench.run(chosen, progress), json, save)


def names_of(text: str) -> tuple[str, ...]:
    """Names between commas."""
    return tuple(name.strip() for name in text.split(","))
