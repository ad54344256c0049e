"""Tasks of a run that are scheduled: an extension that decides, runs and measures them, and two that come with it.

    reduce = aggregation_task(reducer, members, {"flat": FLAT, "levels": ReductionScheme(…)})
    batches = PreparedBatches(make_batch, like=(inputs_bt, targets_bt), ranks=ranks)
    scheduler = TaskScheduler([reduce, batches.task(members)], members, rank=ranks.rank)
    extension = ScheduledTasks(scheduler, reducer=reducer, batches=batches, events=run.events)
    train(config, out=run.path, extensions=[extension], on_batch=batches.on_batch)

In a step: decide → aggregation is set, the next batch is prepared, other work is run → forward, backward → what it all
took goes along with the step's statistics → tasks of kind checkpoint run when the parameters are updated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from laneway.cluster.reduce.scheme import ReductionScheme
from laneway.cluster.tasks import KINDS, Decision, Members, Place, Task, TaskScheduler
from laneway.core import InputError, Statistics
from laneway.rundir import event_row
from laneway.train.patient import PatientRows
from laneway.train.ranks import Ranks

__all__ = ["PreparedBatches", "ScheduledTasks", "aggregation_task", "communicating"]

AGGREGATION, PREPROCESSING = "aggregation", "preprocessing"
BEFORE = tuple(kind for kind in KINDS if kind != "checkpoint")


class Timed(Protocol):
    """A phase of a reduction; ``seconds`` from ``started`` on, ``nbytes`` sent over ``level`` (-1: all ranks at once)."""

    level: int
    nbytes: int
    seconds: float
    started: float


class Reducer(Protocol):
    """What reduces gradients and can be told how, as `HierarchicalReducer`."""

    observers: list[Callable[[Any], object]]

    @property
    def scheme(self) -> ReductionScheme:
        """How it reduces."""
        ...

    def set_scheme(self, scheme: ReductionScheme) -> None:
        """Another way, from the next reduction on."""


def aggregation_task(
    reducer: Reducer,
    members: Members,
    schemes: Mapping[str, ReductionScheme],
    *,
    traffic: Mapping[str, Mapping[str, float]] | None = None,
    name: str = AGGREGATION,
) -> Task:
    """How gradients are reduced, as a task of all ranks: one of several schemes by their names.

    Args:
        reducer: gets the scheme that was decided, at the begin of a step.
        members: all ranks.
        schemes: by names; the first is what a run begins with.
        traffic: for each name, bytes that a rank sends over each level in a step, where known.
        name: of the task.

    Raises:
        InputError: no scheme.
    """
    if not schemes:
        raise InputError("schemes", schemes, "at least one reduction scheme by its name")

    def choose(place: Place) -> None:
        if reducer.scheme != schemes[place.variant]:
            reducer.set_scheme(schemes[place.variant])

    return Task(name, AGGREGATION, members.everyone(*schemes), choose, traffic=traffic or {})


class PreparedBatches:
    """Batches that one rank makes for all: in each step the next step's, on the rank that the scheduler chose.

    Every rank then gets its share of it, rank r part r of as many equal parts as there are ranks, while the step goes on.

    Args:
        prepare: given a step, the whole batch of all ranks as tensors like ``like``. It must depend on the step alone.
        like: tensors of the shape and type of this whole batch; their first dimension divides among the ranks.
        ranks: of the run.
        group: the ranks, by default all.

    Raises:
        InputError: a first dimension that does not divide.
    """

    def __init__(
        self,
        prepare: Callable[[int], Sequence[Tensor]],
        like: Sequence[Tensor],
        ranks: Ranks,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.prepare, self.ranks, self.group = prepare, ranks, group
        self.shapes = [(tuple(tensor.shape), tensor.dtype) for tensor in like]
        for shape, _ in self.shapes:
            if not shape or shape[0] % ranks.world_size:
                raise InputError("like", shape, f"a first dimension that divides among {ranks.world_size} ranks")
        self._made: Sequence[Tensor] = ()
        self._coming: _Coming | None = None
        self._here: tuple[Tensor, ...] = ()
        self.took: tuple[Place, float] | None = None

    def task(self, members: Members, places: Sequence[Place] = (), *, name: str = PREPROCESSING, **options: Any) -> Task:
        """The task, on any single rank or in the places that are given; ``options`` are those of `Task`."""
        return Task(name, PREPROCESSING, tuple(places) or members.ones(), self._run, **options)

    def begin(self, step: int, place: Place) -> None:
        """On all ranks, before tasks run: wait for this step's batch; where none is on its way, it is made here and now."""
        if self._coming is None or self._coming.step != step:
            self._coming = self._send(step, place, self._make(step) if self.ranks.rank == place.ranks[0] else ())
        coming, start = self._coming, time.perf_counter()
        self._here = coming.wait()
        self.took = coming.place, coming.seconds + time.perf_counter() - start
        self._coming = None
        self.step = step

    def send(self, place: Place) -> None:
        """On all ranks, after tasks have run: the next step's batch goes to those who will train on it."""
        made, self._made = self._made, ()
        self._coming = self._send(self.step + 1, place, made)

    def on_batch(self, step: int, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        """This rank's share of what was prepared for the step, instead of ``batch``."""
        here, self._here = self._here, ()
        return here

    def _run(self, place: Place) -> None:
        start = time.perf_counter()
        self._made = self._make(self.step + 1)
        self._seconds = time.perf_counter() - start

    def _make(self, step: int) -> Sequence[Tensor]:
        made = self.prepare(step)
        found = [(tuple(tensor.shape), tensor.dtype) for tensor in made]
        if found != self.shapes:
            raise InputError("prepare", found, f"tensors like those that were named: {self.shapes}")
        return made

    def _send(self, step: int, place: Place, made: Sequence[Tensor]) -> _Coming:
        seconds, self._seconds = self._seconds, 0.0
        if self.ranks.world_size == 1:
            return _Coming(step, place, seconds, tuple(made), [])
        mine, works, kept = [], [], []
        for at, (shape, dtype) in enumerate(self.shapes):
            part = torch.empty((shape[0] // self.ranks.world_size, *shape[1:]), dtype=dtype, device=self.ranks.device)
            parts = [piece.to(part.device) for piece in made[at].chunk(self.ranks.world_size)] if made else None
            works.append(dist.scatter(part, parts, src=place.ranks[0], group=self.group, async_op=True))
            mine.append(part)
            kept.append(parts)
        return _Coming(step, place, seconds, tuple(mine), works, kept)

    _seconds = 0.0
    step = 0


@dataclass
class _Coming:
    """A batch on its way: made in ``place`` in so many ``seconds`` (0 on other ranks)."""

    step: int
    place: Place
    seconds: float
    mine: tuple[Tensor, ...]
    works: list[Any]
    kept: list[Any] = field(default_factory=list)

    def wait(self) -> tuple[Tensor, ...]:
        for work in self.works:
            work.wait()
        return self.mine


class ScheduledTasks:
    """The scheduler as an extension of the training loop.

    Args:
        scheduler: with its tasks.
        reducer: whose collectives are timed: they are what a task of kind aggregation takes.
        batches: prepared by the scheduler's task of kind preprocessing.
        events: ``events.jsonl`` of the run, for decisions that change something; written by rank 0.
        levels: names of the reducer's levels, innermost first; by default those of the scheduler's members.
    """

    def __init__(
        self,
        scheduler: TaskScheduler,
        *,
        reducer: Reducer | None = None,
        batches: PreparedBatches | None = None,
        events: str | Path | None = None,
        levels: Sequence[str] = (),
    ) -> None:
        self.scheduler, self.batches = scheduler, batches
        self.levels = tuple(levels) or scheduler.members.names
        self._timings: list[Timed] = []
        self._reducing = _one(scheduler.tasks, AGGREGATION) if reducer is not None else None
        self._preparing = _one(scheduler.tasks, PREPROCESSING) if batches is not None else None
        if reducer is not None:
            reducer.observers.append(self._timings.append)
        self._events = PatientRows(Path(events), True) if events is not None and scheduler.rank == 0 else None

    def share(self, statistics: Statistics) -> None:
        """Makes room for what the scheduler shares."""
        self.scheduler.share(statistics)

    def on_step_begin(self, step: int) -> None:
        """Decides, and runs what comes before the forward pass."""
        decision = self.scheduler.begin(step)
        if decision.changed and self._events is not None:
            self._events.append(schedule_event(decision))
        place = None if self._preparing is None else self._preparing.place(decision.places[self._preparing.name])
        if self.batches is not None and place is not None:
            self.batches.begin(step, place)
        self._timings.clear()
        self.scheduler.run(*BEFORE)
        if self.batches is not None and place is not None:
            self.batches.send(place)

    def on_backward_end(self, step: int) -> None:
        """Tells what all of it took."""
        timings = list(self._timings)
        for timing in timings:
            if 0 <= timing.level < len(self.levels):
                self.scheduler.observe(self.levels[timing.level], timing.nbytes, timing.seconds)
        if self._reducing is not None and timings:
            self.scheduler.measured(self._reducing.name, communicating(timings))
        if self.batches is not None and self._preparing is not None and self.batches.took is not None:
            place, seconds = self.batches.took
            self.scheduler.measured(self._preparing.name, seconds, place)
        self.scheduler.tell()

    def on_step_end(self, step: int, metrics: dict[str, Any]) -> None:
        """Runs the tasks that need the updated parameters."""
        self.scheduler.run("checkpoint")
        if (decision := self.scheduler.decision) is not None and decision.places:
            metrics["schedule_ms"] = 1000 * decision.seconds

    def state_dict(self) -> dict[str, Any]:
        """What the next decision depends on."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo of ``state_dict``."""
        self.scheduler.load_state_dict(state)


def schedule_event(decision: Decision) -> dict[str, Any]:
    """The row of ``events.jsonl`` for a decision."""
    return event_row(
        "schedule",
        decision.step,
        places=decision.places,
        changed=list(decision.changed),
        reason=decision.reason,
        seconds=decision.seconds,
    )


def communicating(timings: Iterable[Timed]) -> float:
    """Seconds in which at least one of the phases was under way."""
    total, end = 0.0, float("-inf")
    for started, ended in sorted((timing.started, timing.started + timing.seconds) for timing in timings):
        total += max(0.0, ended - max(started, end))
        end = max(end, ended)
    return total


def _one(tasks: Sequence[Task], kind: str) -> Task:
    """The task of a kind of which there must be one, due in every step."""
    found = [task for task in tasks if task.kind == kind and task.every == 1]
    if len(found) != 1:
        raise InputError("tasks", [task.name for task in tasks if task.kind == kind], f"one task of kind {kind}, in every step")
    return found[0]
