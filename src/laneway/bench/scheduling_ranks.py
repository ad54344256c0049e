"""What the ranks of ``laneway bench scheduling`` do: a step with each fixed choice and with the scheduled one, in turns."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from laneway.bench.netlab import Context, Network, host_name
from laneway.cluster.reduce.groups import LevelGroups
from laneway.cluster.reduce.reducer import HierarchicalReducer
from laneway.cluster.reduce.scheme import FLAT, LevelScheme, ReductionScheme
from laneway.cluster.tasks import Members, Place, Task, TaskScheduler
from laneway.train.packed import SharedStatistics

__all__ = ["EXPERIMENTS", "SCHEDULED", "Setting", "network_of", "rank_main"]

SCHEDULED = "scheduled"
MBIT = 1e6 / 8


@dataclass(frozen=True)
class Setting:
    """An experiment.

    Attributes:
        nbytes: of the batch that is sent out, or of the vector that is reduced.
        host_mbit, rack_mbit: rates of links.
        slow_mbit: of the link that has other traffic.
        seconds: of work: of the task, and of the load that moves.
        racks, hosts: a host has one rank.
    """

    nbytes: int = 0
    host_mbit: float = 400.0
    rack_mbit: float = 1000.0
    slow_mbit: float = 40.0
    seconds: float = 0.0
    racks: int = 2
    hosts: int = 2


EXPERIMENTS = {
    "preparing": Setting(nbytes=1 << 20),
    "reducing": Setting(nbytes=1 << 20, host_mbit=800.0, rack_mbit=4000.0, slow_mbit=200.0),
    "computing": Setting(seconds=0.03, racks=1),
}


def network_of(setting: Setting) -> Network:
    """One rank a host."""
    return Network.grid(setting.racks, setting.hosts, 1, host_mbit=setting.host_mbit, rack_mbit=setting.rack_mbit)


class Preparing:
    """One rank makes the batch and sends every other its share; the link of one host after the other has other traffic."""

    def __init__(self, context: Context, setting: Setting) -> None:
        self.context, self.setting = context, setting
        self.mine = torch.empty(setting.nbytes // 4 // context.world)
        self.parts: list[torch.Tensor] = []
        self.task = Task("prepare", "preprocessing", Members(context.positions).ones(), self.make)
        self.slow = -1

    def load(self, phase: int) -> None:
        """Another host's link is slow; on rank 0 alone."""
        hosts = [host_name(*place) for place in self.context.positions]
        if self.slow >= 0:
            self.context.set_rate(hosts[self.slow], self.setting.host_mbit)
        self.slow = phase % len(hosts)
        self.context.set_rate(hosts[self.slow], self.setting.slow_mbit)

    def make(self, place: Place) -> None:
        """The batch, on the rank that makes it."""
        self.parts = list(torch.ones(self.setting.nbytes // 4).chunk(self.context.world))

    def together(self, place: Place) -> None:
        """What all ranks do."""
        dist.scatter(self.mine, self.parts if self.context.rank == place.ranks[0] else None, src=place.ranks[0])

    def close(self) -> None:
        """Nothing to end."""


class Reducing:
    """All ranks reduce a vector, flat or over the levels; the racks' uplinks have other traffic in every other phase."""

    def __init__(self, context: Context, setting: Setting) -> None:
        self.context, self.setting = context, setting
        positions = [(rack, host) for rack, host in context.positions]
        self.reducer = HierarchicalReducer(LevelGroups.from_positions(positions))
        ways = {"flat": FLAT, "levels": ReductionScheme((LevelScheme(), LevelScheme(), LevelScheme()))}
        self.schemes = ways
        self.vector = torch.ones(setting.nbytes // 4)
        self.task = Task("reduce", "aggregation", Members(positions).everyone(*ways), self.choose)

    def load(self, phase: int) -> None:
        """Uplinks are slow, or not; on rank 0 alone."""
        for rack in range(self.setting.racks):
            self.context.set_rate(f"rack{rack}", self.setting.slow_mbit if phase % 2 else self.setting.rack_mbit)

    def choose(self, place: Place) -> None:
        """The way that was decided."""
        if self.reducer.scheme != self.schemes[place.variant]:
            self.reducer.set_scheme(self.schemes[place.variant])

    def together(self, place: Place) -> None:
        """What all ranks do."""
        self.reducer.all_reduce(self.vector.fill_(1.0))
        assert float(self.vector[-1]) == self.context.world

    def close(self) -> None:
        """End the reducer's threads."""
        self.reducer.close()


class Computing:
    """One rank has a piece of work to do for all; its own work is more on one rank, which is another one in every phase."""

    def __init__(self, context: Context, setting: Setting) -> None:
        self.context, self.setting, self.busy = context, setting, 0
        self.task = Task("work", "compute", Members(context.positions).ones(), self.work)

    def load(self, phase: int) -> None:
        """Another rank has more to do; on every rank."""
        self.busy = phase % self.context.world

    def work(self, place: Place) -> None:
        """The piece of work, where it was sent."""
        spin(self.setting.seconds)

    def together(self, place: Place) -> None:
        """Each rank's own work."""
        if self.context.rank == self.busy:
            spin(self.setting.seconds)

    def close(self) -> None:
        """Nothing to end."""


SUBJECTS: dict[str, Any] = {"preparing": Preparing, "reducing": Reducing, "computing": Computing}


def spin(seconds: float) -> None:
    """Work that takes so many seconds on a core."""
    end, block = time.thread_time() + seconds, b"x" * 4096
    while time.thread_time() < end:
        hashlib.sha256(block).digest()


class Runner:
    """A subject under the scheduler, and the same with a choice that is given."""

    def __init__(self, context: Context, subject: Any) -> None:
        self.context, self.subject = context, subject
        self.task: Task = subject.task
        self.scheduler = TaskScheduler([self.task], Members(context.positions), rank=context.rank, debug=True)
        self.shared = SharedStatistics("cpu", context.rank, context.world)
        self.scheduler.share(self.shared)
        self.shared.seal()
        self.flying = False

    def fixed(self, name: str) -> None:
        """A step with a choice that never changes."""
        place = self.task.place(name)
        if self.context.rank in place.ranks:
            self.task.run(place)
        self.subject.together(place)

    def scheduled(self, step: int) -> str:
        """A step as it is decided, the decision included; returns the choice."""
        if self.flying:
            self.shared.finish()
        place = self.task.place(self.scheduler.begin(step).places[self.task.name])
        start = time.perf_counter()
        self.scheduler.run()
        self.subject.together(place)
        if not isinstance(self.subject, Computing):
            self.scheduler.measured(self.task.name, time.perf_counter() - start)
        self.scheduler.tell()
        self.shared.start()
        self.flying = True
        return place.name


def rank_main(context: Context, experiment: str, phases: int, steps: int) -> list[dict[str, Any]]:
    """All steps of an experiment on one rank: for each step the seconds of each choice, and what was decided.

    Args:
        context: of the lab.
        experiment: one of `EXPERIMENTS`.
        phases: how often the load changes.
        steps: in each phase.
    """
    torch.set_num_threads(1)
    context.start_gloo(60)
    subject = SUBJECTS[experiment](context, EXPERIMENTS[experiment])
    runner, names = Runner(context, subject), [place.name for place in subject.task.places]
    for name in names:
        runner.fixed(name)  # gloo connects at the first use
    rows = []
    for step in range(1, phases * steps + 1):
        phase, first = divmod(step - 1, steps)
        if first == 0 and (context.rank == 0 or isinstance(subject, Computing)):
            subject.load(phase)
        rows.append({"step": step, "phase": phase} | one_step(context, runner, names, step))
    runner.shared.finish()
    context.barrier()
    subject.close()
    dist.destroy_process_group()
    return rows


def one_step(context: Context, runner: Runner, names: list[str], step: int) -> dict[str, Any]:
    """Every choice once; the one that goes first moves on by one in each step."""
    choices, row = [SCHEDULED, *names], {}
    at = step % len(choices)
    for name in choices[at:] + choices[:at]:
        timed = context.timed((lambda: runner.scheduled(step)) if name == SCHEDULED else (lambda name=name: runner.fixed(name)))
        row[name] = timed.seconds
        if name == SCHEDULED:
            row["decided"] = timed.value
    return row
