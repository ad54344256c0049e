"""Where tasks run: the plan is the best there is, the same on every rank, and does not flap; tasks run where it says."""

from __future__ import annotations

import itertools
import json
import math
import random
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from laneway.cluster.tasks import Decision, Members, Place, Rules, Task, TaskScheduler, prefers
from laneway.cluster.tasks.choose import Chooser
from laneway.cluster.tasks.clock import WorkClock
from laneway.cluster.tasks.costs import Costs
from laneway.cluster.tasks.load import LoadRow, row_size
from laneway.cluster.tasks.solve import Option, solve, value
from laneway.core import InputError, LanewayError

GRID = [(rack, host) for rack in range(2) for host in range(2) for _ in range(2)]


def nothing(place: Place) -> None:
    pass


# -- members


def test_levels_between_ranks():
    members = Members(GRID)
    assert members.names == ("L1", "L2", "L3")
    assert [members.between(0, other) for other in range(8)] == [-1, 0, 1, 1, 2, 2, 2, 2]
    assert members.group("L1", 3) == (2, 3)
    assert members.group("L2", 5) == (4, 5, 6, 7)
    assert [place.ranks for place in members.ones()] == [(rank,) for rank in range(8)]
    assert [place.ranks for place in members.ones("L2")] == [(0,), (2,), (4,), (6,)]
    assert [place.ranks for place in members.ones("L3")] == [(0,), (4,)]
    assert [place.ranks for place in members.groups("L2")] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert members.everyone("a", "b")[1] == Place("b", tuple(range(8)), "b")


def test_ranks_in_any_order_and_hosts_of_any_size():
    members = Members([("b",), ("a",), ("b",), ("a",), ("a",)])
    assert members.group("L1", 4) == (1, 3, 4)
    assert [place.ranks for place in members.groups("L1")] == [(0, 2), (1, 3, 4)]
    assert Members([(), ()]).between(0, 1) == 0


# -- the solver


@st.composite
def problems(draw: st.DrawFn, together: bool = True) -> tuple[list[list[Option]], list[float]]:
    world = draw(st.integers(1, 4))
    seconds = st.integers(0, 80).map(lambda eighths: eighths / 8)  # sums are exact: of equal plans, equal numbers
    ranks = st.sets(st.integers(0, world - 1), min_size=1, max_size=world if together else 1).map(
        lambda found: tuple(sorted(found))
    )
    option = st.builds(Option, seconds, ranks)
    tasks = draw(st.lists(st.lists(option, min_size=1, max_size=4), max_size=5))
    return tasks, draw(st.lists(seconds, min_size=world, max_size=world))


@given(problems())
@settings(deadline=None, max_examples=80)
def test_the_plan_is_the_best_of_all(problem):
    tasks, busy = problem
    found = solve(tasks, busy)
    every = [value(tasks, busy, picks) for picks in itertools.product(*(range(len(options)) for options in tasks))]
    end = min(plan.end for plan in every)
    work = min(plan.work for plan in every if plan.end <= end + 1e-9)
    assert found.exact
    assert found.end == pytest.approx(end, rel=1e-9, abs=1e-9)
    assert found.work == pytest.approx(work, rel=1e-6, abs=1e-6)
    told = value(tasks, busy, found.picks)
    assert (told.end, told.work) == pytest.approx((found.end, found.work))
    assert solve(tasks, busy) == found


@given(st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=10)
def test_the_plan_ends_when_an_integer_program_says(seed):
    draw = np.random.default_rng(seed)
    tasks, ranks = 7, 4
    cost, busy = draw.uniform(0.5, 2, (tasks, ranks)), draw.uniform(0, 3, ranks)
    picks = tasks * ranks
    once = np.hstack([np.kron(np.eye(tasks), np.ones(ranks)), np.zeros((tasks, 1))])
    load = np.hstack([np.hstack([np.diag(cost[task]) for task in range(tasks)]), -np.ones((ranks, 1))])
    best = milp(
        np.append(np.zeros(picks), 1.0),
        constraints=[LinearConstraint(once, 1, 1), LinearConstraint(load, -np.inf, -busy)],
        bounds=Bounds(np.append(np.zeros(picks), busy.max()), np.append(np.ones(picks), np.inf)),
        integrality=np.append(np.ones(picks), 0),
        options={"mip_rel_gap": 0},
    )
    found = solve([[Option(cost[task, rank], (rank,)) for rank in range(ranks)] for task in range(tasks)], list(busy))
    assert found.end == pytest.approx(best.fun, rel=1e-6)


def test_too_many_branches_still_make_a_plan():
    draw = random.Random(3)
    tasks = [[Option(draw.uniform(1, 2), (rank,)) for rank in range(8)] for _ in range(30)]
    found = solve(tasks, [0.0] * 8, nodes=500)
    assert not found.exact
    assert found == solve(tasks, [0.0] * 8, nodes=500)
    assert found.end <= 1.6 * sum(min(option.seconds for option in options) for options in tasks) / 8


# -- tasks


def test_a_kernel_without_a_level_is_told_of_once():
    @prefers(level="L1")
    def near(place: Place) -> None:
        pass

    def anywhere(place: Place) -> None:
        pass

    places = Members(GRID).ones()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert Task("near", "kernel", places, near).level == "L1"
        assert Task("given", "kernel", places, anywhere, level="L2").level == "L2"
        assert Task("other", "compute", places, anywhere).level == ""
        assert not caught
        for _ in range(2):
            Task("far", "kernel", places, anywhere)
    assert len(caught) == 1
    assert "anywhere names no level" in str(caught[0].message)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "kernels"}, "kind: got 'kernels'; accepted: one of compute.*did you mean 'kernel'"),
        ({"seconds": -1.0}, "seconds: got -1.0; accepted: a number ≥ 0"),
        ({"nbytes": math.inf}, "nbytes: got inf"),
        ({"every": 0}, "every: got 0; accepted: an integer ≥ 1"),
        ({"places": ()}, r"places: got \[\]; accepted: at least one place with ranks for task 'a'"),
        ({"places": (Place("x", (0,)), Place("x", (1,)))}, "each name once"),
        ({"traffic": {"flat": {}}}, "traffic: got 'flat'"),
    ],
)
def test_a_task_that_cannot_be_is_refused(fields, message):
    task = Task("a", "compute", Members(GRID).ones(), nothing)
    with pytest.raises(InputError, match=message):
        replace(task, **fields)


@pytest.mark.parametrize(
    ("fields", "options", "message"),
    [
        ({"home": 8}, {}, "home: got 8; accepted: ranks from 0 to 7"),
        ({"level": "L9"}, {}, "level: got 'L9'; accepted: one of L1, L2, L3"),
        ({"places": (Place("x", (9,)),)}, {}, "places: got 9"),
        ({}, {"rank": 8}, "rank: got 8"),
        ({}, {"stray": 0.5}, "stray: got 0.5; accepted: a number ≥ 1"),
        ({}, {"links": {"L2": 0.0}}, "links: got 0.0; accepted: bytes per second > 0 for L2"),
        ({}, {"rules": Rules(gain=1.0)}, "rules.gain: got 1.0"),
        ({}, {"rules": Rules(patience=0)}, "rules.patience: got 0"),
    ],
)
def test_a_scheduler_that_cannot_be_is_refused(fields, options, message):
    members = Members(GRID)
    task = replace(Task("a", "compute", members.ones(), nothing), **fields)
    with pytest.raises(InputError, match=message):
        TaskScheduler([task], members, **({"rank": 0} | options))
    with pytest.raises(InputError, match="each name once"):
        TaskScheduler([], members, rank=0)


# -- decisions


def chooser(tasks: list[Task], members: Members, links: dict[str, float] | None = None, **rules: Any) -> Chooser:
    found = Rules(**rules)
    return Chooser(Costs(tasks, members, links or {}, 2.0, found.refresh), found)


def rows(
    members: Members,
    tasks: list[Task],
    decision: Decision,
    took: dict[tuple[str, str], float],
    *,
    busy: list[float] | None = None,
    slow: list[float] | None = None,
    wire: dict[int, dict[str, float]] | None = None,
) -> list[LoadRow]:
    """What the ranks measure in a step that is decided so: ``took[task, place]`` seconds."""
    found = []
    for rank in range(members.world):
        row = LoadRow.blank(len(members.names), len(tasks))
        row.busy = busy[rank] if busy else 0.0
        row.slow = slow[rank] if slow else 1.0
        for level, seconds in (wire or {}).get(rank, {}).items():
            row.wire[members.level(level)] = seconds
        for number, index in decision.indices.items():
            place = tasks[number].places[index]
            if rank in place.ranks:
                row.tasks[number] = took[tasks[number].name, place.name], float(index)
        found.append(row)
    return found


def test_a_task_goes_where_its_data_are_and_away_from_a_busy_rank():
    members = Members(GRID)
    tasks = [Task("prepare", "preprocessing", members.ones(), nothing, seconds=0.1, home=2, nbytes=1e6)]
    plan = chooser(tasks, members, {"L1": 1e9, "L2": 1e7, "L3": 1e6})
    assert plan.choose(1).places == {"prepare": "rank 2"}
    took = {("prepare", f"rank {rank}"): 0.1 for rank in range(8)}
    busy = [0.5] * 8
    busy[2] = 0.9
    places = []
    for step in range(2, 12):
        plan.learn(rows(members, tasks, decision := plan.choose(step), took, busy=busy), step)
        places.append((decision.places["prepare"], decision.reason))
    assert places[0] == ("rank 2", "kept")
    assert [reason for _, reason in places].count("better") == 1
    assert places[-1] == ("rank 3", "kept")  # beside its data


def test_a_kernel_stays_within_its_level_unless_that_is_dear():
    members = Members(GRID)
    kernel = Task("kernel", "kernel", members.ones(), nothing, seconds=1.0, home=0, level="L1")
    busy = [5.0, 5.0, 4.5, 0, 0, 0, 0, 0]
    for away, expected in ((4.5, "rank 3"), (0.5, "rank 3")):
        plan = chooser([kernel], members)
        plan.costs.busy = [*busy[:2], away, away, *([away] * 4)]
        near = plan.choose(1)
        assert near.places["kernel"] == ("rank 2" if away == 0.5 else "rank 0"), expected
    plan = chooser([replace(kernel, level="L2")], members)
    plan.costs.busy = [5.0, 5.0, 4.5, 4.5, 4.5, 4.5, 4.5, 4.5]
    assert plan.choose(1).places["kernel"] == "rank 2"


def test_unknown_ways_are_tried_one_after_the_other_and_the_best_stays():
    members = Members(GRID)
    tasks = [Task("reduce", "aggregation", members.everyone("flat", "two", "three"), nothing)]
    took = {("reduce", "flat"): 3.0, ("reduce", "two"): 2.0, ("reduce", "three"): 2.5}
    plan, seen = chooser(tasks, members), []
    for step in range(1, 30):
        decision = plan.choose(step)
        plan.learn(rows(members, tasks, decision, took), step)
        seen.append((decision.places["reduce"], decision.reason))
    assert seen[:3] == [("flat", "first"), ("two", "trial"), ("three", "trial")]
    assert set(seen[3:]) == {("two", "kept"), ("two", "end of trial")}


@pytest.mark.parametrize("noise", [0.0, 0.04])
@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_a_load_that_moves_is_followed_and_beats_every_fixed_choice(noise, ranks):
    members, draw = Members([(rank,) for rank in range(ranks)]), random.Random(5)
    tasks = [Task("fetch", "preprocessing", members.ones(), nothing)]
    plan, total, fixed, switches = chooser(tasks, members), 0.0, [0.0] * ranks, 0
    for step in range(1, 301):
        slow = step // 50 % ranks
        took = [(1.0 if rank == slow else 0.2) * (1 + noise * draw.uniform(-1, 1)) for rank in range(ranks)]
        decision = plan.choose(step)
        plan.learn(rows(members, tasks, decision, {("fetch", f"rank {r}"): s for r, s in enumerate(took)}), step)
        total += took[decision.indices[0]]
        fixed = [sum_ + seconds for sum_, seconds in zip(fixed, took, strict=True)]
        switches += decision.reason == "better"
    assert total < 0.85 * min(fixed)
    assert total < 0.2 * 300 * 1.3  # not far from what it would take to know beforehand
    assert switches <= 7  # once for each time that the load came to where the task was


def test_noise_below_the_margin_changes_nothing():
    members, draw = Members([(0,), (1,)]), random.Random(7)
    tasks = [Task("reduce", "aggregation", members.everyone("a", "b"), nothing)]
    plan, changes = chooser(tasks, members), []
    for step in range(1, 200):
        took = {("reduce", name): 1 + 0.04 * draw.uniform(-1, 1) for name in "ab"}
        plan.learn(rows(members, tasks, decision := plan.choose(step), took), step)
        changes += decision.changed
    assert len(changes) <= 3  # first, the one trial and back


def test_slow_cores_and_links_are_avoided_before_anything_ran_there():
    members = Members([(0,), (0,), (1,), (1,)])
    tasks = [Task("work", "compute", members.ones(), nothing, seconds=1.0), Task("far", "compute", members.ones("L2"), nothing,
             home=3, nbytes=1e6)]  # fmt: skip
    plan = chooser(tasks, members)
    decision = plan.choose(1)
    took = {("work", f"rank {r}"): 1.0 for r in range(4)} | {("far", f"rank {r}"): 0.1 for r in (0, 2)}
    wire = {rank: {"L1": 1e-9, "L2": 1e-6} for rank in range(4)}
    first, slow = decision.indices[0], [1.0] * 4
    slow[first] = 3.0
    for step in range(1, 6):
        plan.learn(rows(members, tasks, decision, took, slow=slow, wire=wire), step)
        decision = plan.choose(step + 1)
    assert plan.picks[0] != first
    assert decision.places["far"] == "rank 2"  # beside its home, though rank 0 comes first


def test_a_task_that_is_due_now_and_then_is_decided_when_it_is():
    members = Members([(0,), (1,)])
    tasks = [Task("save", "checkpoint", members.ones(), nothing, seconds=1.0, every=5)]
    plan, took = chooser(tasks, members), {("save", "rank 0"): 1.0, ("save", "rank 1"): 1.0}
    ran = []
    for step in range(1, 16):
        decision = plan.choose(step)
        ran += [(step, place) for place in decision.places.values()]
        plan.learn(rows(members, tasks, decision, took, busy=[0.0, 2.0] if step < 7 else [2.0, 0.0]), step)
    assert ran == [(5, "rank 0"), (10, "rank 1"), (15, "rank 1")]


@given(st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=15)
def test_every_rank_decides_the_same_also_after_a_resume(seed):
    """Ranks see the same rows; one of them goes by way of a checkpoint in the middle."""
    draw = random.Random(seed)
    members, traffic = Members(GRID), {"flat": {"L3": 1e6}, "levels": {"L2": 1e6}}

    def make() -> Chooser:
        tasks = [
            Task("a", "compute", members.ones("L2"), nothing, seconds=0.3, home=1, nbytes=1e5),
            Task("b", "aggregation", members.everyone("flat", "levels"), nothing, traffic=traffic),
            Task("c", "checkpoint", members.ones("L3"), nothing, every=3),
        ]
        return chooser(tasks, members, {"L3": 1e6, "L2": 1e7}, refresh=3, patience=2)

    plans = [make() for _ in range(3)]
    for step in range(1, 25):
        decisions = [plan.choose(step) for plan in plans]
        assert len({decision.digest() for decision in decisions}) == 1
        measured = [[draw.choice([math.nan, draw.uniform(0, 1)]) for _ in range(row_size(3, 3))] for _ in range(8)]
        for row in measured:
            row[1] = draw.uniform(1, 3)
            for number in range(3):
                index = decisions[0].indices.get(number)
                row[6 + 2 * number] = math.nan if index is None else float(index)
        for plan in plans:
            plan.learn([LoadRow.of(row, 3) for row in measured], step)
        if step == 12:
            again = make()
            again.load_state_dict(json.loads(json.dumps(plans[2].state_dict())))
            plans[2] = again


@given(st.lists(st.floats(allow_nan=False, width=32), min_size=row_size(2, 3), max_size=row_size(2, 3)))
def test_rows_come_back(numbers):
    assert LoadRow.of(numbers, 2).flat() == numbers


# -- the scheduler


class Alone:
    """Statistics of a single rank: what was put is there in the next step."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self.values: dict[str, Any] = {}

    def add(self, name: str, size: int = 1, op: str = "sum") -> None:
        self.sizes[name] = size

    def put(self, name: str, values: Any) -> None:
        assert len(values) == self.sizes[name]
        self.values[name] = np.array([values] if name == "tasks/load" else values)

    def get(self, name: str) -> Any:
        return self.values.get(name)


def test_tasks_run_where_they_were_sent_and_are_measured():
    members, ran, logged = Members([()]), [], []
    tasks = [
        Task("one", "compute", members.everyone("x", "y"), lambda place: ran.append(place.name) or 7),
        Task("two", "checkpoint", members.ones(), lambda place: ran.append("two"), every=2),
    ]
    scheduler = TaskScheduler(tasks, members, rank=0, debug=True, log=logged.append)
    with pytest.raises(LanewayError, match="call share"):
        scheduler.begin(1)
    scheduler.share(Alone())
    with pytest.raises(LanewayError, match="needs the decision"):
        scheduler.run()
    for step in range(1, 5):
        decision = scheduler.begin(step)
        found = scheduler.run()
        assert found["one"] == 7
        assert set(found) == set(decision.places)
        scheduler.tell()
    assert ran[:4] == ["x", "y", "two", ran[3]]
    assert {tuple(decision.places) for decision in logged} >= {("one",), ("one", "two")}
    assert set(scheduler.chooser.costs.seen[0]) == {0, 1}
    with pytest.raises(InputError, match="name: got 'three'"):
        scheduler.measured("three", 1.0)


def test_only_kinds_that_are_asked_for_run():
    members, ran = Members([()]), []
    tasks = [Task(kind, kind, members.ones(), lambda place, kind=kind: ran.append(kind)) for kind in ("compute", "checkpoint")]
    scheduler = TaskScheduler(tasks, members, rank=0)
    scheduler.share(Alone())
    scheduler.begin(1)
    scheduler.run("checkpoint")
    assert ran == ["checkpoint"]
    scheduler.run("compute")
    assert ran == ["checkpoint", "compute"]


def test_decisions_that_differ_are_found_out():
    members = Members([()])
    scheduler = TaskScheduler([Task("a", "compute", members.ones(), nothing)], members, rank=0, debug=True)
    alone = Alone()
    scheduler.share(alone)
    scheduler.begin(1)
    scheduler.tell()
    scheduler.begin(2)
    scheduler.tell()
    alone.values["tasks/decision"][0] += 1  # another rank's is larger
    with pytest.raises(LanewayError, match="decided differently in step 2"):
        scheduler.begin(3)


def test_a_state_of_other_tasks_is_left():
    members = Members([()])
    one = TaskScheduler([Task("a", "compute", members.ones(), nothing)], members, rank=0)
    two = TaskScheduler([Task(name, "compute", members.ones(), nothing) for name in "ab"], members, rank=0)
    before = two.state_dict()
    two.load_state_dict(one.state_dict())
    assert two.state_dict() == before


def test_the_clock_counts_work_and_no_sleep():
    import time

    clock = WorkClock()
    time.sleep(0.05)
    asleep, _ = clock.take()
    end = time.perf_counter() + 0.05
    while time.perf_counter() < end:
        pass
    at_work, ratio = clock.take()
    assert asleep < 0.04
    assert at_work > 0.045
    assert ratio >= 1
