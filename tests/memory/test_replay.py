"""The simulated device: what it costs by hand, what holds on any trace, and the optimum of tiny ones."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_cases import fewest_loads, traces, unit_traces

from laneway.core import InputError, LanewayError
from laneway.memory.device import Device, Options
from laneway.memory.link import Link, Way
from laneway.memory.policies import POLICIES, Victim, lru
from laneway.memory.replay import replay
from laneway.memory.trace import Entry, Event, Trace

SLOW = Link(1000.0, 1000.0, latency=0.0)


def one_way(*events, entries):
    return Trace("hand", tuple(entries), tuple(Event(*event) for event in events))


@given(
    traces(), st.sampled_from(sorted(POLICIES)), st.floats(0.3, 1.0), st.sampled_from([0.0, 0.05]), st.booleans(), st.booleans()
)
@settings(max_examples=80, deadline=None)
def test_what_holds_on_every_trace(trace, policy, share, prefetch, write_behind, duplex):
    budget = max(1, int(share * trace.peak))
    link = Link(2000.0, 1500.0, latency=1e-3, duplex=duplex)
    arguments = {"prefetch": prefetch, "write_behind": write_behind, "warmup": len(trace.steps) // 2}
    try:
        found = replay(trace, budget, policy, link, **arguments)
    except LanewayError as error:
        message = str(error)
    else:
        message = ""
    if message:
        assert f"the budget is {budget} bytes" in message
        return
    assert found.peak_bytes <= budget
    assert found.seconds == pytest.approx(found.compute_seconds + found.stall_seconds + found.recompute_seconds, abs=1e-9)
    assert found.compute_seconds == pytest.approx(trace.seconds(arguments["warmup"]), abs=1e-9)
    assert found.stall_seconds >= 0
    assert replay(trace, budget, policy, link, **arguments) == found, "the clock is virtual: the same every time"


@given(traces(), st.sampled_from(sorted(POLICIES)))
@settings(max_examples=50, deadline=None)
def test_within_its_peak_a_trace_only_loads_what_was_given(trace, policy):
    found = replay(trace, trace.peak, policy, SLOW)
    assert (found.bytes_out, found.evictions, found.recomputations) == (0, 0, 0)
    assert found.bytes_in == sum(trace.entries[number].nbytes for number in trace.given)
    assert found.peak_bytes <= trace.peak


@given(unit_traces(), st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_belady_loads_as_little_as_any_choice_on_unit_sizes(trace, slots):
    best = fewest_loads(trace, slots)
    found = {name: replay(trace, slots, name, SLOW).bytes_in for name in POLICIES}
    assert found["belady"] == best
    assert min(found.values()) == best, "nothing loads less than the optimum"


def test_lru_is_not_the_optimum():
    trace = one_way(*((1e-3, "use", number) for number in (0, 1, 2, 0, 1, 2, 0, 1, 2)), entries=[Entry(1, "parameter")] * 3)
    assert replay(trace, 2, "lru", SLOW).bytes_in == 9
    assert replay(trace, 2, "belady", SLOW).bytes_in == fewest_loads(trace, 2) == 6


def test_stalls_by_hand():
    """Three activations of 100 bytes, room for two, 1000 bytes a second."""
    trace = one_way(
        (1.0, "produce", 0), (1.0, "produce", 1), (1.0, "produce", 2), (1.0, "use", 2), (0.0, "free", 2),
        (0.5, "use", 1), (0.0, "free", 1), (0.5, "use", 0), (0.0, "free", 0),
        entries=[Entry(100, "activation")] * 3,
    )  # fmt: skip
    found = replay(trace, 200, "lru", SLOW)
    # The third waits at 2.0 until the first is out (0.1); that one comes back at 5.1 (0.1).
    assert (found.stall_seconds, found.seconds) == (pytest.approx(0.2), pytest.approx(5.2))
    assert (found.bytes_out, found.bytes_in, found.evictions) == (100, 100, 1)
    with pytest.raises(LanewayError, match=r"event 1 needs 100 bytes besides 100 .* the budget is 199 bytes"):
        replay(trace, 199, "lru", SLOW)


def test_recomputing_by_hand():
    entries = [Entry(10, "parameter", "m"), Entry(100, "activation", "m", 1, 0.01, (0,))]
    entries += [Entry(100, "activation", "m", 2)] * 2
    trace = one_way(
        (1.0, "use", 0), (1.0, "produce", 1), (1.0, "produce", 2), (1.0, "produce", 3), (1.0, "use", 3), (0.0, "free", 3),
        (1.0, "use", 2), (0.0, "free", 2), (1.0, "use", 1), (0.0, "free", 1),
        entries=entries,
    )  # fmt: skip

    def drop(view):
        return [Victim(entry, drop=True) for entry in view.residents if entry.recompute_seconds is not None]

    found = replay(trace, 210, drop, SLOW)
    assert (found.recomputations, found.recompute_seconds) == (1, 0.01)
    assert found.bytes_out == 0
    assert found.stall_seconds == pytest.approx(0.01), "the parameter came in once"
    moved = replay(trace, 210, lambda view: [Victim(entry) for entry in view.residents if entry.nbytes == 100], SLOW)
    assert (moved.recomputations, moved.recompute_seconds) == (0, 0.0)
    assert moved.seconds > found.seconds


def test_write_behind_and_prefetch_hide_the_link():
    """A step that is the same every time: what is learned from the first two is brought in ahead."""
    entries, events, starts = [Entry(100, "parameter", f"m{i}", i) for i in range(4)], [], []
    for _ in range(5):
        starts.append(len(events))
        for number in range(4):
            events += [Event(0.5, "use", number), Event(0.0, "produce", number)]
    trace = Trace("loop", tuple(entries), tuple(events), tuple(starts))
    demand = replay(trace, 300, "lru", SLOW, warmup=3)
    ahead = replay(trace, 300, "lru", SLOW, warmup=3, prefetch=0.6)
    behind = replay(trace, 300, "lru", SLOW, warmup=3, prefetch=0.6, write_behind=True)
    assert demand.stall_seconds > ahead.stall_seconds > 0 or ahead.stall_seconds == 0 < demand.stall_seconds
    assert behind.stall_seconds == 0.0
    assert behind.bytes_out >= ahead.bytes_out


def test_one_way_at_a_time_is_slower():
    entries, events = [Entry(100, "parameter", f"m{i}") for i in range(3)], []
    for _ in range(6):
        for number in range(3):
            events += [Event(0.01, "use", number), Event(0.0, "produce", number)]
    trace = Trace("loop", tuple(entries), tuple(events))
    both, one = (replay(trace, 250, "lru", replace(SLOW, duplex=duplex), write_behind=True) for duplex in (True, False))
    assert one.stall_seconds >= both.stall_seconds > 0


@given(traces(least=4, most=5), st.floats(0.5, 0.9))
@settings(max_examples=25, deadline=None)
def test_the_variant_comes_from_the_steps_before(trace, share):
    """What follows the warm-up has no say in the choice: with another future the choice is the same."""
    budget = int(share * trace.peak)
    cut = trace.until(3)
    last = trace.until(len(trace.steps) - 1) if len(trace.steps) > 4 else trace
    try:
        found = [replay(each, budget, "cost_aware", SLOW, warmup=2).variant for each in (cut, last, trace)]
    except LanewayError:
        return
    assert len(set(found)) == 1
    assert found[0]


def test_clairvoyance_is_only_for_belady():
    """Policies see predictions; the same past gives the same victims whatever comes next."""
    seen = []

    def spy(view):
        seen.append([(entry.nbytes, entry.last_use, entry.next_use) for entry in view.residents])
        return lru(view)

    past = [(0.1, "produce", 0), (0.1, "produce", 1), (0.1, "produce", 2)]
    entries = [Entry(size, "activation") for size in (10, 20, 30)]
    for order in ((1, 2, 0), (2, 0, 1)):
        seen.append("run")
        replay(one_way(*past, *((0.1, "use", number) for number in order), entries=entries), 50, spy, SLOW)
    first, second = seen[1], seen[seen.index("run", 1) + 1]
    assert first == second


def test_a_policy_that_frees_nothing_is_an_error_not_an_overrun():
    trace = one_way((0.1, "produce", 0), (0.1, "produce", 1), entries=[Entry(10, "activation")] * 2)
    with pytest.raises(LanewayError, match="event 1 needs 10 bytes"):
        replay(trace, 15, lambda view: [], SLOW)


def test_a_read_before_its_write_is_refused():
    trace = one_way((0.1, "produce", 0), entries=[Entry(10, "activation")])
    device = Device(trace, Options(10, SLOW), lru)
    with pytest.raises(AssertionError, match="read before it is written"):
        device._bring_in(device.held[0])


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"budget": 0}, "budget"),
        ({"budget": 1.5}, "budget"),
        ({"policy": "lur"}, "policy"),
        ({"prefetch": -1.0}, "prefetch"),
        ({"prefetch": math.nan}, "prefetch"),
        ({"warmup": 1}, "warmup"),
    ],
)
def test_bad_arguments(change, field):
    trace = one_way((0.1, "produce", 0), entries=[Entry(10, "activation")])
    arguments = {"budget": 10, "policy": "lru", "link": SLOW} | change
    with pytest.raises(InputError) as caught:
        replay(trace, **arguments)
    assert caught.value.field == field


@pytest.mark.parametrize("change", [{"out_bytes_per_second": 0.0}, {"in_bytes_per_second": -1.0}, {"latency": -1.0}])
def test_bad_links(change):
    with pytest.raises(InputError) as caught:
        replace(SLOW, **change)
    assert caught.value.field in change


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=20))
def test_a_way_is_busy_between_none_and_all_of_the_time(transfers):
    way, now = Way(), 0.0
    for wait, seconds in transfers:
        now += wait
        before = way.free_at
        assert way.book(seconds, now) == max(before, now) + seconds
        way.observe(now, 0.5)
        assert 0.0 <= way.busy <= 1.0
