"""The timer that every benchmark shares: variants take turns in one process, round after round.

A round runs each variant once, and the variant that goes first moves on by one every round, so that neither a slow minute of
the machine nor a neighbour's leftovers in the cache fall on one variant alone. Two clocks are read: wall time, and CPU time
of the whole process. On a machine that others load, CPU time leaves out the time the process was not running; it adds up the
threads, and counts those that spin while they wait.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from laneway.bench.stats import Interval, paired_ratio, quartiles

Clock = Callable[[], float]


@dataclass
class Samples:
    """Seconds of one variant, one entry a round."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def seconds(self, clock: str = "wall") -> list[float]:
        """The samples of the clock ``wall`` or ``cpu``."""
        return {"wall": self.wall_s, "cpu": self.cpu_s}[clock]

    def last(self, rounds: int) -> Samples:
        """The newest ``rounds`` rounds."""
        return Samples(self.wall_s[-rounds:], self.cpu_s[-rounds:])

    def columns(self) -> dict[str, float | int]:
        """Rounds, medians and quartiles as columns of a row, in milliseconds."""
        row: dict[str, float | int] = {"rounds": len(self.wall_s)}
        for clock in ("wall", "cpu"):
            q1, median, q3 = (1000 * value for value in quartiles(self.seconds(clock)))
            row |= {f"{clock}_ms": median, f"{clock}_ms_q1": q1, f"{clock}_ms_q3": q3}
        return row


def ratio(above: Samples, below: Samples, clock: str = "wall") -> Interval:
    """Median over the rounds of above / below: how many times longer ``above`` took."""
    return paired_ratio(above.seconds(clock), below.seconds(clock))


def interleave(
    variants: Mapping[str, Callable[[], object]],
    *,
    seconds: float,
    min_rounds: int = 5,
    max_rounds: int = 200,
    warmup: int = 1,
    synchronise: Callable[[], object] = lambda: None,
    clocks: tuple[Clock, Clock] = (time.perf_counter, time.process_time),
) -> dict[str, Samples]:
    """Run the variants in turns until the time is up.

    Args:
        variants: what to time, by name; the results are dropped inside the timed part, as a training step would.
        seconds: time budget of the rounds, without the warm-up; no round begins that is not expected to end in it.
        min_rounds: rounds that are run even beyond the budget.
        max_rounds: rounds after which to stop in any case.
        warmup: rounds before the first one that counts.
        synchronise: waits for the device, called before each reading of the clocks.
        clocks: wall clock and CPU clock, in seconds.
    """
    names = list(variants)
    samples = {name: Samples() for name in names}
    for _ in range(warmup):
        for name in names:
            variants[name]()
    wall, cpu = clocks
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()  # a collection would fall on whichever variant is running
    try:
        start = wall()
        for done in range(max_rounds):
            elapsed = wall() - start
            if done >= min_rounds and elapsed + elapsed / done > seconds:
                break
            for name in _turn(names, done):
                synchronise()
                wall_0, cpu_0 = wall(), cpu()
                variants[name]()
                synchronise()
                cpu_1, wall_1 = cpu(), wall()
                samples[name].wall_s.append(wall_1 - wall_0)
                samples[name].cpu_s.append(cpu_1 - cpu_0)
    finally:
        if collecting:
            gc.enable()
    return samples


def _turn(names: list[str], number: int) -> list[str]:
    """The order of round ``number``."""
    first = number % len(names) if names else 0
    return names[first:] + names[:first]
