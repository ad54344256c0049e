"""What the ranks of ``laneway bench adaptation`` do: reduce a vector step by step while the rate of a link changes."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from laneway.bench.netlab import Context
from laneway.cluster.drop.dropper import GradientDropper
from laneway.cluster.probe.adapt import NetworkAdapter
from laneway.cluster.probe.health import Rules
from laneway.cluster.probe.links import LinkProbe
from laneway.cluster.reduce.groups import LevelGroups
from laneway.cluster.reduce.reducer import HierarchicalReducer
from laneway.cluster.reduce.scheme import LevelScheme, ReductionScheme
from laneway.train.packed import SharedStatistics

__all__ = ["Course", "rank_main", "scheme_of"]

SETTLE = 6
MIDST = 0.02
"""Seconds into a step at which the rate changes."""


@dataclass(frozen=True)
class Course:
    """What happens to the network, and what is done about it.

    Attributes:
        link: whose rate changes.
        mbit: its rate while it is slow.
        before, during, after: steps before it gets slow, while it is, and after it was given its rate back: of these, as many as
            it takes until the first scheme is back, and `SETTLE` more.
        nbytes: of the vector.
        chunk_bytes: of a piece of it.
        idle_s: between two reductions, as the forward pass leaves the links.
        jitter: in every step, the link's rate is drawn from its rate ± this share.
        adapt: whether anything is done about it.
        drop: whether the outermost level may drop.
    """

    link: str = "rack1"
    mbit: float = 30.0
    before: int = 12
    during: int = 12
    after: int = 24
    nbytes: int = 1 << 20
    chunk_bytes: int = 1 << 18
    idle_s: float = 0.05
    jitter: float = 0.0
    adapt: bool = True
    drop: bool = False

    def phase(self, step: int) -> str:
        """Of a step, counted from 1."""
        return "before" if step <= self.before else "during" if step <= self.before + self.during else "after"


def scheme_of(course: Course, levels: int) -> ReductionScheme:
    """That of good times."""
    return ReductionScheme((LevelScheme(),) * levels, course.chunk_bytes)


class Runner:
    """One rank's reducer with its adapter."""

    def __init__(self, context: Context, course: Course, rules: Rules) -> None:
        self.context, self.course = context, course
        self.groups = LevelGroups.from_positions(context.positions)
        self.reducer = HierarchicalReducer(self.groups, scheme_of(course, len(self.groups.names)), debug=True)
        self.dropper = GradientDropper() if course.drop else None
        self.reducer.dropper = self.dropper
        self.events: list[dict[str, Any]] = []
        self.probe = LinkProbe(self.groups, nbytes=1 << 17)
        self.adapter = NetworkAdapter(self.reducer, probe=self.probe, rules=rules, tell=self._tell, debug=True)
        self.shared = SharedStatistics("cpu", context.rank, context.world)
        self.adapter.share(self.shared)
        self.shared.seal()
        self.vector = torch.empty(course.nbytes // 4)
        self.step, self.rate = 0, context.network.rate(f"{course.link}.{'up' if course.link.startswith('rack') else 'out'}")
        self.draw = random.Random(0)

    def _tell(self, kind: str, **fields: Any) -> None:
        self.events.append({"step": self.step, "kind": kind} | fields)

    def one(self, step: int) -> dict[str, Any]:
        """A step; its seconds and bytes, and the scheme it was done with."""
        self.step, course = step, self.course
        if course.adapt:
            self.adapter.on_step_begin(step)
        time.sleep(course.idle_s)
        if self.context.rank == 0:
            self._change(step)
        timed = self.context.timed(self._reduce)
        if course.adapt:
            self.adapter.on_backward_end(step)
            self.shared.start()
            self.shared.finish()
        row = {"step": step, "phase": course.phase(step), "scheme": str(self.reducer.scheme), "seconds": timed.seconds}
        return row | {"nbytes": timed.nbytes}

    def settled(self, rows: list[dict[str, Any]]) -> bool:
        """Whether all is as it was."""
        base = str(self.adapter.base)
        return len(rows) >= SETTLE and all((row["phase"], row["scheme"]) == ("after", base) for row in rows[-SETTLE:])

    def _reduce(self) -> None:
        self.vector.fill_(1.0)
        if self.dropper is not None:
            self.dropper.carry_into(self.vector, "vector")
        self.reducer.all_reduce(self.vector, key="vector")

    def _change(self, step: int) -> None:
        course, phase = self.course, self.course.phase(step)
        rate = course.mbit if phase == "during" else self.rate
        if course.jitter:
            self.context.set_rate(course.link, rate * self.draw.uniform(1 - course.jitter, 1 + course.jitter))
        elif step > 1 and course.phase(step - 1) != phase:
            threading.Timer(MIDST, self.context.set_rate, (course.link, rate)).start()


def rank_main(context: Context, course: dict[str, Any], rules: dict[str, Any] | None = None) -> dict[str, Any]:
    """All steps on one rank: rows, events, and what the probe told last.

    Args:
        context: of the lab.
        course: fields of `Course`.
        rules: fields of `Rules`.
    """
    torch.set_num_threads(1)
    context.start_gloo(60)
    runner = Runner(context, Course(**course), Rules(**(rules or {})))
    total = runner.course.before + runner.course.during + runner.course.after
    rows: list[dict[str, Any]] = []
    while len(rows) < total and not runner.settled(rows):
        rows.append(runner.one(len(rows) + 1))
    number = runner.probe.start() if runner.probe.completed == runner.adapter._asked else runner.adapter._asked
    last = runner.probe.result(number, timeout=30.0)
    runner.adapter.close()
    left = 0 if runner.dropper is None else len(runner.dropper.residuals())
    context.barrier()
    runner.reducer.close()
    dist.destroy_process_group()
    paths = [asdict(path) for path in last.paths]
    return {"rows": rows, "events": runner.events, "paths": paths, "residuals": left, "switches": runner.adapter.switches}
