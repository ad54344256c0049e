"""What the controls of streams and gradients cost: beside the hyper-connections alone, and in a step over several ranks.

``control_cost`` measures the first in one process, at several sizes; ``control_ranks`` the second.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from laneway.bench import control_cost, control_ranks
from laneway.bench.control_cost import ControlCostOptions
from laneway.bench.control_ranks import ControlRanksOptions
from laneway.bench.rows import Report
from laneway.core import InputError, positive_int

SIZES = ((512, 128), (2048, 256), (4096, 512))


@dataclass(frozen=True)
class ControlsOptions:
    """What is measured."""

    cost: ControlCostOptions = field(default_factory=lambda: ControlCostOptions(seconds=40.0))
    """Of one process; its tokens and dim are those of ``sizes``."""
    sizes: tuple[tuple[int, int], ...] = SIZES
    """(tokens, dim) of a batch."""
    ranks: ControlRanksOptions | None = field(default_factory=lambda: ControlRanksOptions(cycles=6))
    """None leaves the ranks out."""

    def check(self) -> None:
        """Raise InputError for the first field that is out of range."""
        if not self.sizes:
            raise InputError("sizes", "none", "one or more TOKENSxDIM")
        for size in self.sizes:
            for number in size:
                positive_int("sizes", number)
        self.cost.check()
        if self.ranks is not None:
            self.ranks.check()


def quick(options: ControlsOptions) -> ControlsOptions:
    """At most a minute on one core: the smallest size, few sites and rounds, two ranks of a small model."""
    ranks = None if options.ranks is None else control_ranks.quick(options.ranks)
    tokens, dim = min(options.sizes)
    return replace(options, cost=control_cost.quick(options.cost), sizes=((min(tokens, 1024), min(dim, 256)),), ranks=ranks)


def run(options: ControlsOptions, progress: Callable[[str], None] = lambda line: None) -> Report:
    """Both tables.

    Raises:
        InputError: an option out of range.
        LanewayError: a rank failed, or they took too long.
    """
    options.check()
    report = Report("controls", {"control_cost": []}, {})
    for tokens, dim in options.sizes:
        found = control_cost.run(replace(options.cost, tokens=tokens, dim=dim), progress)
        report.tables["control_cost"] += found.tables["control_cost"]
        report.summary |= {f"{tokens}x{dim}: {name}": values for name, values in found.summary.items()}
        report.notes += [note for note in found.notes if note not in report.notes]
    if options.ranks is not None:
        found = control_ranks.run(options.ranks, progress)
        report.tables |= found.tables
        report.summary |= {f"{options.ranks.ranks} ranks: {name}": values for name, values in found.summary.items()}
        report.notes += found.notes
    return report
