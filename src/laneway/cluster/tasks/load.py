"""What each rank tells the others once a step: how busy it is, how slow its links are, how long its tasks took. No torch here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["LoadRow", "row_size"]


def row_size(levels: int, tasks: int) -> int:
    """Numbers in a rank's row."""
    return 2 + levels + 2 * tasks


@dataclass
class LoadRow:
    """One rank's row; NaN for what it has not measured.

    Attributes:
        busy: seconds of its own work in the step, beside tasks.
        slow: seconds that its work took for each second that it needed: 1 on an idle machine.
        wire: for each level, innermost first, seconds a byte.
        tasks: for each task, the seconds that it took here, and the index of the place.
    """

    busy: float
    slow: float
    wire: list[float]
    tasks: list[tuple[float, float]]

    @classmethod
    def blank(cls, levels: int, tasks: int) -> LoadRow:
        """Nothing measured."""
        return cls(math.nan, math.nan, [math.nan] * levels, [(math.nan, math.nan)] * tasks)

    def flat(self) -> list[float]:
        """As it is sent."""
        return [self.busy, self.slow, *self.wire, *(number for pair in self.tasks for number in pair)]

    @classmethod
    def of(cls, numbers: Sequence[float], levels: int) -> LoadRow:
        """Undo of ``flat``."""
        pairs = list(numbers[2 + levels :])
        return cls(numbers[0], numbers[1], list(numbers[2 : 2 + levels]), list(zip(pairs[::2], pairs[1::2], strict=True)))
