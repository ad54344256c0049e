"""Policies as functions of a view; what they know of next uses; traces as files."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_cases import traces

from laneway.core import InputError, LanewayError
from laneway.memory.next_use import NextUse
from laneway.memory.policies import POLICIES, VARIANTS, Tuning, View, cost_aware, lru
from laneway.memory.trace import TICK, Entry, Event, Trace


@dataclass(frozen=True)
class Seen:
    nbytes: int = 100
    born: float = 0.0
    last_use: float = 0.0
    next_use: float = 10.0
    known_use: float = 10.0
    depth: int | None = None
    write_seconds: float = 0.1
    reload_seconds: float = 0.1
    recompute_seconds: float | None = None
    in_flight_seconds: float = 0.0


seconds = st.floats(0, 10)
seen = st.builds(
    Seen, st.integers(1, 100), seconds, seconds, st.floats(0, 20) | st.just(math.inf), seconds, st.none() | st.integers(0, 9),
    seconds, seconds, st.none() | seconds, st.just(0.0) | seconds,
)  # fmt: skip
everyone = {**POLICIES, **{f"cost_aware, {name}": policy for name, policy in VARIANTS["cost_aware"].items()}}


def names(victims):
    return [victim.entry for victim in victims]


@pytest.mark.parametrize("policy", everyone.values(), ids=everyone)
@given(st.lists(seen, max_size=12), st.integers(1, 400), st.floats(0, 1), st.floats(0, 5), st.booleans())
@settings(max_examples=30, deadline=None)
def test_victims_cover_the_need_or_are_all_there_is(policy, residents, need, busy, backlog, urgent):
    view = View(5.0, need, residents, busy, busy, backlog, backlog, urgent)
    found = policy(view)
    assert len({id(victim.entry) for victim in found}) == len(found)
    assert all(any(victim.entry is entry for entry in residents) for victim in found)
    total = sum(victim.entry.nbytes for victim in found)
    if sum(entry.nbytes for entry in residents) >= need:
        assert total >= need
    else:
        assert len(found) == len(residents)
    assert all(victim.entry.recompute_seconds is not None for victim in found if victim.drop)
    assert policy(view) == found, "a pure function"


def test_orders():
    a, b, c = Seen(born=1, last_use=9, known_use=7), Seen(born=2, last_use=8, known_use=9), Seen(born=3, last_use=7, known_use=8)
    view = View(10.0, 100, [a, b, c])
    assert names(POLICIES["fifo"](view)) == [a]
    assert names(POLICIES["lru"](view)) == [c]
    assert names(POLICIES["belady"](view)) == [b]


def test_belady_keeps_what_the_room_does_not_need():
    far, near = Seen(nbytes=10, known_use=9), Seen(nbytes=100, known_use=8)
    assert names(POLICIES["belady"](View(0.0, 100, [far, near]))) == [near]
    assert names(POLICIES["belady"](View(0.0, 105, [far, near]))) == [far, near]


@given(st.lists(seen, min_size=2, max_size=8), st.integers(1, 300))
@settings(max_examples=50, deadline=None)
def test_cost_aware_needs_every_one_of_its_victims(residents, need):
    found = cost_aware(View(5.0, need, residents))
    total = sum(victim.entry.nbytes for victim in found)
    if total >= need:
        assert all(total - victim.entry.nbytes < need for victim in found)


def test_cost_aware_prefers_the_later_the_cheaper_and_the_never_used():
    now = Seen(next_use=1.0)
    later, copied, never = replace(now, next_use=5.0), replace(now, write_seconds=0.0), replace(now, next_use=math.inf)
    flying = replace(copied, in_flight_seconds=0.05)
    assert names(cost_aware(View(0.0, 100, [flying, copied], 0.9, 0.9))) == [copied], "the step would wait for its end"
    for tuning in (Tuning(0.0), Tuning(1.0)):
        for better in (later, copied, never):
            assert names(cost_aware(View(0.0, 100, [now, better, now], 0.9, 0.9), tuning)) == [better]


def test_an_idle_link_moves_and_a_full_one_recomputes():
    entry = Seen(next_use=1.0, write_seconds=0.05, reload_seconds=0.1, recompute_seconds=0.03)
    idle, full = View(0.0, 1, [entry], urgent=False), View(0.0, 1, [entry], 1.0, 1.0, urgent=False)
    assert [victim.drop for victim in cost_aware(idle)] == [False]
    assert [victim.drop for victim in cost_aware(full)] == [True]
    backlog = replace(idle, read_backlog=2.0)
    assert cost_aware(backlog)[0].drop, "an idle moment with a queue before it hides nothing"
    waiting = replace(idle, urgent=True)
    assert cost_aware(waiting)[0].drop, "the step would wait for the copy"
    assert not cost_aware(full, Tuning(recompute=math.inf))[0].drop
    assert not cost_aware(full, Tuning(recompute=10.0))[0].drop


def test_variants_begin_with_the_policy_itself():
    assert next(iter(VARIANTS["cost_aware"].values())) is POLICIES["cost_aware"]
    assert lru in VARIANTS["cost_aware"].values()


# Predictions


def test_delays_of_the_step_before_are_the_prediction():
    predict = NextUse([Entry(1, "parameter", "m"), Entry(1, "activation", "m"), Entry(1, "activation", "m")])
    predict.begin_step(0.0)
    for number, now in ((0, 1.0), (1, 2.0), (1, 5.0), (0, 6.0)):
        assert not predict.access(number, now).sure
    predict.begin_step(10.0)
    found = [predict.access(number, now) for number, now in ((0, 11.5), (2, 12.0), (2, 15.0), (0, 16.0))]
    assert [(round(each.at, 9), each.sure) for each in found] == [(16.5, True), (15.0, True), (math.inf, True), (21.0, True)]
    assert predict.step_seconds == 10.0


def test_rare_experts_are_expected_later():
    entries = [Entry(1, "expert", f"experts.{number}") for number in range(3)]
    predict, rng = NextUse(entries), [(0, 1, 2), (0, 1), (0,), (0, 1), (0,), (0, 1)]
    for step, used in enumerate(rng):
        predict.begin_step(10.0 * step)
        for number in used:
            predict.access(number, 10.0 * step + 1.0)
    predict.begin_step(60.0)
    at = [predict.again(number, 60.0, 0.0).at for number in range(3)]
    assert 61.0 <= at[0] < at[1] < at[2]
    assert at[0] < 63.0
    assert at[1] > 65.0
    assert all(predict.sporadic(number) for number in range(3))


@given(st.lists(st.lists(st.tuples(st.integers(0, 2), st.floats(0, 3)), max_size=6), min_size=1, max_size=6), st.floats(0, 9))
def test_a_fresh_prediction_is_never_in_the_past(steps, later):
    """Whatever the steps were like: a step that lasts longer than the one before, an expert that skips some."""
    predict, now = NextUse([Entry(1, kind, f"m{kind}") for kind in ("expert", "optimizer", "activation")]), 0.0
    for step in steps:
        predict.begin_step(now)
        for number, passed in step:
            now += passed
            predict.access(number, now)
    now += later
    for number in range(3):
        for expected in (0.0, now / 2, math.inf):
            assert predict.again(number, now, expected).at >= now


def test_what_is_late_is_expected_after_as_long_again():
    predict = NextUse([Entry(1, "activation")])
    predict.begin_step(0.0)
    predict.access(0, 1.0)
    found = predict.again(0, 5.0, 4.0)
    assert (found.at, found.sure) == (6.0, False)


# Traces


@given(traces())
@settings(max_examples=30, deadline=None)
def test_files_give_back_the_trace(tmp_path_factory, trace):
    path = tmp_path_factory.mktemp("traces") / "new" / "x.json.gz"
    trace.save(path)
    found = Trace.load(path)
    assert (found.name, found.steps, found.given, found.peak) == (trace.name, trace.steps, trace.given, trace.peak)
    assert [event[1:] for event in found.events] == [event[1:] for event in trace.events]
    assert all(abs(a.gap - b.gap) <= TICK for a, b in zip(found.events, trace.events, strict=True))
    first = path.read_bytes()
    found.save(path)
    assert path.read_bytes() == first, "the same bytes for the same trace"


A, P = Entry(10, "activation"), Entry(5, "parameter")
GOOD = Trace("x", (A, P), (Event(0.5, "use", 1), Event(1.0, "produce", 0, 7), Event(0.0, "use", 0), Event(0.5, "free", 0, 9)))


def test_what_a_trace_says():
    assert GOOD.given == {1}
    assert GOOD.peak == 5 + 10 + 9
    assert GOOD.seconds() == 2.0
    two = replace(GOOD, steps=(0, 2))
    assert two.seconds(1) == 0.5
    assert two.until(1).events == GOOD.events[:2]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"entries": (A._replace(nbytes=0), P)}, "entries[0].nbytes"),
        ({"entries": (A._replace(kind="weights"), P)}, "entries[0].kind"),
        ({"entries": (A._replace(depth=-1), P)}, "entries[0].depth"),
        ({"entries": (A._replace(recompute_seconds=math.nan), P)}, "entries[0].recompute_seconds"),
        ({"entries": (A._replace(recompute_seconds=1.0, inputs=(0,)), P)}, "entries[0].inputs"),
        ({"entries": (A._replace(inputs=(1,)), P)}, "entries[0].inputs"),
        ({"events": (Event(-1.0, "use", 1),)}, "events[0].gap"),
        ({"events": (Event(0.0, "read", 1),)}, "events[0].action"),
        ({"events": (Event(0.0, "use", 2),)}, "events[0].entry"),
        ({"events": (Event(0.0, "use", 1, -1),)}, "events[0].other"),
        ({"steps": (1,)}, "steps"),
        ({"steps": (0, 9)}, "steps"),
        ({"steps": ()}, "steps"),
        ({"events": (*GOOD.events, Event(0.0, "use", 0))}, "events[4].action"),
        ({"events": (*GOOD.events, Event(0.0, "produce", 0))}, "events[4].action"),
    ],
)
def test_bad_traces(change, field):
    with pytest.raises(InputError) as caught:
        replace(GOOD, **change)
    assert caught.value.field == field


@pytest.mark.parametrize("spoil", ["produce", "free"])
def test_what_is_recomputed_needs_its_inputs_to_the_end(spoil):
    entries = (P, A._replace(recompute_seconds=1.0, inputs=(0,)))
    events = (Event(0.0, "use", 0), Event(1.0, "produce", 1), Event(1.0, spoil, 0), Event(1.0, "use", 1))
    with pytest.raises(InputError, match="unchanged while entry 1 is recomputed from it"):
        Trace("x", entries, events)
    Trace("x", entries, (*events[:2], events[3], events[2]))


def test_files_that_are_no_traces(tmp_path):
    path = tmp_path / "x.json.gz"
    with pytest.raises(LanewayError, match="can't be read"):
        Trace.load(path)
    for content in (b"no gzip", gzip.compress(b"{}"), gzip.compress(b"[1]"), gzip.compress(b"\xff")):
        path.write_bytes(content)
        with pytest.raises(LanewayError, match=r"x\.json\.gz"):
            Trace.load(path)
    GOOD.save(path)
    found = json.loads(gzip.decompress(path.read_bytes()))
    path.write_bytes(gzip.compress(json.dumps(found | {"format": 2}).encode()))
    with pytest.raises(LanewayError, match="format 2"):
        Trace.load(path)
    found["entries"]["nbytes"][0] = -1
    path.write_bytes(gzip.compress(json.dumps(found).encode()))
    with pytest.raises(LanewayError, match=r"not a valid trace: entries\[0\]\.nbytes"):
        Trace.load(path)
