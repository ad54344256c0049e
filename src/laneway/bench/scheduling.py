"""``laneway bench scheduling``: decisions before every step against each choice that never changes, under a load that moves.

Three experiments, each in a network lab (`netlab`) with one rank a host. ``preparing``: which rank makes the batch and sends it
out, while the link of one host after the other is slow. ``reducing``: flat or over the levels, while the uplinks are slow in
every other phase. ``computing``: which rank does a piece of work, while one rank after the other has more to do itself. In every
step all choices and the scheduled one take turns, so that they meet the same load. ``hindsight`` is the best fixed choice of each
phase, which is known only when the phase is over.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from laneway.bench import netlab
from laneway.bench.rows import Report, Row
from laneway.bench.stats import CONFIDENCE, RESAMPLES, SEED, Interval, parts
from laneway.core import choices, positive_int

__all__ = ["SchedulingOptions", "quick", "rows_of", "run"]

EXPERIMENTS = ("preparing", "reducing", "computing")
SCHEDULED, HINDSIGHT = "scheduled", "hindsight"
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class SchedulingOptions:
    """What is run.

    Attributes:
        experiments: some of `EXPERIMENTS`.
        phases: how often the load changes; a multiple of four meets every host equally often.
        steps: in each phase.
    """

    experiments: tuple[str, ...] = EXPERIMENTS
    phases: int = 8
    steps: int = 16
    quick: bool = False

    def check(self) -> None:
        """Raise InputError where a value is out of range."""
        choices("experiments", self.experiments, EXPERIMENTS)
        positive_int("phases", self.phases)
        positive_int("steps", self.steps)


def quick(options: SchedulingOptions) -> SchedulingOptions:
    """At most a minute on two cores."""
    return replace(options, phases=4, steps=10, quick=True)


def run(options: SchedulingOptions, progress: Callable[[str], None] = lambda line: None) -> Report:
    """Run the experiments.

    Raises:
        Unavailable: no network lab can be made on this machine.
    """
    options.check()
    from laneway.bench.scheduling_ranks import EXPERIMENTS as SETTINGS
    from laneway.bench.scheduling_ranks import network_of

    rows: list[Row] = []
    for experiment in options.experiments:
        progress(f"{experiment}: {options.phases} phases of {options.steps} steps")
        found = netlab.run(
            "laneway.bench.scheduling_ranks:rank_main",
            network_of(SETTINGS[experiment]),
            {"experiment": experiment, "phases": options.phases, "steps": options.steps},
            timeout=TIMEOUT_S,
        )
        rows += rows_of(experiment, found[0])
    netlab.shutdown()
    notes = ["quick: few steps; for looking, not for quoting"] if options.quick else []
    return Report("scheduling", {"scheduling": rows}, _summary(rows), notes)


def rows_of(experiment: str, steps: Sequence[dict[str, Any]]) -> list[Row]:
    """A row for each choice: its seconds over all steps, and over those of the best choice that never changes."""
    names = [name for name in steps[0] if name not in ("step", "phase", "decided")]
    seconds = {name: np.array([step[name] for step in steps]) for name in names}
    phases = np.array([step["phase"] for step in steps])
    fixed = [name for name in names if name != SCHEDULED]
    seconds[HINDSIGHT] = np.empty(len(steps))
    for phase in sorted(set(phases.tolist())):
        here = phases == phase
        best = min(fixed, key=lambda name: float(seconds[name][here].sum()))
        seconds[HINDSIGHT][here] = seconds[best][here]
    best = min(fixed, key=lambda name: float(seconds[name].sum()))
    decided = [step["decided"] for step in steps]
    changes = sum(one != other for one, other in pairwise(decided))
    return [
        {
            "experiment": experiment,
            "choice": name,
            "best_fixed": int(name == best),
            "phases": len(set(phases.tolist())),
            "steps": len(steps),
            "changes": changes if name == SCHEDULED else 0,
            "seconds": float(took.sum()),
            "step_ms": 1000 * statistics.median(took.tolist()),
            **_over(took, seconds[best], phases).columns("over_best_fixed"),
        }
        for name, took in seconds.items()
    ]


def _over(took: np.ndarray, best: np.ndarray, phases: np.ndarray) -> Interval:
    """Ratio of the sums, with its bootstrap interval over steps within their phases (percentiles)."""
    random, ratios = np.random.default_rng(SEED), []
    groups = [np.flatnonzero(phases == phase) for phase in np.unique(phases)]
    for _ in range(RESAMPLES // 4):
        picks = np.concatenate([random.choice(group, len(group)) for group in groups])
        ratios.append(took[picks].sum() / best[picks].sum())
    low, high = np.quantile(ratios, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(float(took.sum() / best.sum()), float(low), float(high))


def _summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Per experiment: seconds of the scheduled steps over those of the best fixed choice."""
    return {row["experiment"]: {"over_best_fixed": parts(row, "over_best_fixed")} for row in rows if row["choice"] == SCHEDULED}
