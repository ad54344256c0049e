"""What `laneway bench NAME` is about to do, once its arguments are checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Job:
    """A benchmark's module with its options; whether JSON is wanted; where to save ("" for the checkout), or None."""

    bench: Any
    options: Any
    json: bool
    save: str | None

    def work(self, progress: Callable[[str], None]) -> Any:
        """Run it; ``progress`` is told each step in a line."""
        return self.bench.run(self.options, progress)


def job_of(bench: Any, options: Any, quick: bool, json: bool, save: str | None) -> Job:
    """A benchmark's module with its options, checked, and made quick where that was asked for."""
    options.check()
    return Job(bench, bench.quick(options) if quick else options, json, save)
