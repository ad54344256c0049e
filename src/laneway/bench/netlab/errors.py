"""What can go wrong with a lab, apart from bad input."""

from __future__ import annotations

from dataclasses import dataclass

from laneway.core import LanewayError

__all__ = ["Ended", "LabError", "RankFailed", "TimeLimit", "Unavailable"]


class Unavailable(LanewayError):  # noqa: N818
    """This machine can't host a lab; one line says what is missing."""


class LabError(LanewayError):
    """The lab itself failed: its network could not be built, or its first process ended without a result."""


@dataclass(frozen=True)
class Ended:
    """A rank or host that gave no result.

    Attributes:
        reason: one line.
        traceback: of the exception, empty where there was none.
        signal: number of the signal that ended it, 0 for none.
        output: the end of what it wrote to stdout and stderr; for one that hung, with the stacks of its threads.
    """

    reason: str
    traceback: str = ""
    signal: int = 0
    output: str = ""

    def __str__(self) -> str:
        parts = [self.traceback.rstrip() or self.reason]
        if self.output.strip():
            parts.append("output:\n" + self.output.rstrip())
        return "\n".join(parts)


class RankFailed(LanewayError):  # noqa: N818
    """Ranks (or hosts, under torchrun) failed.

    Attributes:
        failures: what happened, by rank or host.
        results: what the others returned.
    """

    def __init__(self, failures: dict[int, Ended] | dict[str, Ended], results: dict[int, object] | None = None) -> None:
        self.failures, self.results = failures, results or {}
        super().__init__("\n".join(f"--- {_who(who)}: {found.reason}\n{found}" for who, found in failures.items()))


class TimeLimit(RankFailed):
    """The time limit was hit; ``failures`` holds those that were still running, with their stacks."""


def _who(who: int | str) -> str:
    return f"rank {who}" if isinstance(who, int) else f"host {who}"
