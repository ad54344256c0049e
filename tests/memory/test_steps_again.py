"""Steps that come again: rehearsing them, what is written ahead of them, copies under way, drops that exclude each other."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_cases import traces

from laneway.core import LanewayError
from laneway.memory.device import Device, Options
from laneway.memory.link import Link
from laneway.memory.policies import VARIANTS, Victim, lru
from laneway.memory.replay import replay
from laneway.memory.trace import Entry, Event, Trace

SLOW = Link(1000.0, 1000.0, latency=0.0)


@given(traces(), st.data())
@settings(max_examples=40, deadline=None)
def test_steps_again_are_the_same_steps(trace, data):
    first = data.draw(st.integers(0, len(trace.steps) - 1))
    found = trace.again(first)
    start, count = trace.steps[first], len(trace.events)
    assert found.until(len(trace.steps)).events == trace.events
    assert [step - count for step in found.steps[len(trace.steps) :]] == [step - start for step in trace.steps[first:]]
    names: dict[int, int] = {}
    for event, again in zip(trace.events[start:], found.events[count:], strict=True):
        assert event[:2] + event[3:] == again[:2] + again[3:]
        assert names.setdefault(event.entry, again.entry) == again.entry
        one, other = trace.entries[event.entry], found.entries[again.entry]
        assert one[:5] == other[:5]
        assert [names[number] for number in one.inputs] == list(other.inputs)
    assert (found.given, found.peak) == (trace.given, trace.peak)
    assert all((number in trace.given) == (number == again) for number, again in names.items())


def test_what_lives_across_steps_lives_on():
    events = [
        Event(1.0, "produce", 0),
        Event(1.0, "produce", 1),
        Event(1.0, "free", 0),
        Event(1.0, "use", 1),
        Event(0.0, "free", 1),
    ]
    trace = Trace("x", (Entry(1, "activation"), Entry(1, "activation")), tuple(events), (0, 1))
    found = trace.again(1)
    assert [event[1:3] for event in found.events[1:]] == [
        ("produce", 1), ("use", 0), ("use", 1), ("free", 1), ("produce", 2), ("use", 0), ("use", 2), ("free", 2),
    ]  # fmt: skip
    assert found.steps == (0, 1, 5)


@given(traces(most=1), st.floats(0.75, 0.99), st.sampled_from([0.0, 0.05, 0.3]), st.booleans(), st.booleans())
@settings(max_examples=15, deadline=None)
def test_never_a_point_over_lru_where_steps_repeat(trace, share, prefetch, write_behind, duplex):
    """Eight steps alike; half of them are seen before."""
    trace = trace.again(0).again(0).again(0)
    settings = {"prefetch": prefetch, "write_behind": write_behind, "warmup": 4}
    link = Link(2000.0, 1500.0, 1e-3, duplex)
    try:
        ours, theirs = (replay(trace, max(1, int(share * trace.peak)), name, link, **settings) for name in ("cost_aware", "lru"))
    except LanewayError:
        return
    assert ours.overhead <= theirs.overhead + 0.01


@given(traces(least=3, most=3), st.floats(0.5, 0.9))
@settings(max_examples=15, deadline=None)
def test_the_fastest_of_the_steps_again_is_chosen(trace, share):
    budget, again = int(share * trace.peak), trace.again(1)
    took = {}
    for name, policy in VARIANTS["cost_aware"].items():
        device = Device(again, Options(budget, SLOW), next(iter(VARIANTS["cost_aware"].values())))
        try:
            for step in range(len(again.steps)):
                device.policy = policy if step >= len(trace.steps) else device.policy
                device.run_step(step)
            took[name] = device.counted().seconds
        except LanewayError:
            return
    try:
        chosen = replay(again.until(4), budget, "cost_aware", SLOW, warmup=3).variant
    except LanewayError:
        return
    assert took[chosen] == min(took.values())


@given(traces(least=2), st.floats(0.5, 1.0))
@settings(max_examples=20, deadline=None)
def test_a_copy_of_a_device_goes_its_own_way(trace, share):
    options = Options(int(share * trace.peak), SLOW, 0.05, True)
    one = Device(trace, options, lru)
    try:
        one.run_step(0)
        other, before = one.copy(), one.counted()
        other.run_step(1)
        assert one.counted() == before
        one.run_step(1)
    except LanewayError:
        return
    assert one.counted() == other.counted()


def sawtooth(steps):
    """Twelve activations of 100 bytes, half a second apart, used in reverse; the same every step."""
    entries, events, starts = [], [], []
    for _ in range(steps):
        starts.append(len(events))
        numbers = range(len(entries), len(entries) + 12)
        entries += [Entry(100, "activation", f"m{place}", place) for place in range(12)]
        events += [Event(0.5, "produce", number) for number in numbers]
        events += [Event(gap, action, n) for n in reversed(numbers) for gap, action in ((0.5, "use"), (0.0, "free"))]
    return Trace("sawtooth", tuple(entries), tuple(events), tuple(starts))


@pytest.mark.parametrize("policy", ["lru", "cost_aware"])
def test_writes_begin_before_memory_is_full_and_only_where_it_will_be(policy):
    """The last two must wait for the copies of the first two, which take 2 s each and may begin 4.5 s before the last."""
    settings = {"prefetch": 1.0, "write_behind": True, "warmup": 2}
    short = replay(sawtooth(4), 1000, policy, replace(SLOW, out_bytes_per_second=50.0), **settings)
    assert short.stall_seconds == 0.0
    assert short.bytes_out >= 2 * 200
    enough = replay(sawtooth(4), 1200, policy, SLOW, **settings)
    assert (enough.bytes_out, enough.stall_seconds) == (0, 0.0)


def test_a_copy_under_way_is_no_free_victim_and_cannot_be_dropped():
    entries = [Entry(10, "parameter", "m")] + [Entry(100, "activation", "m", n, 0.01, (0,)) for n in range(3)]
    events = [Event(0.1, "use", 0)] + [
        Event(0.01, *each) for each in (("produce", 1), ("produce", 2), ("use", 0), ("produce", 3))
    ]
    events += [Event(0.1, action, number) for number in (3, 2, 1) for action in ("use", "free")]
    seen = []

    def spy(view):
        seen.extend((held.nbytes, held.write_seconds, held.in_flight_seconds, held.recompute_seconds) for held in view.residents)
        return lru(view)

    replay(Trace("x", tuple(entries), tuple(events)), 300, spy, SLOW, write_behind=True)
    flying = [row for row in seen if row[2]]
    assert flying
    assert all(write == 0.0 and 0.0 < left <= 0.1 and again is None for _, write, left, again in flying)


def test_a_drop_that_another_made_impossible_is_chosen_anew():
    entries = [Entry(10, "parameter"), Entry(100, "activation", "", 0, 0.01, (0,)), Entry(100, "activation", "", 1, 0.01, (1,))]
    entries.append(Entry(200, "activation"))
    events = [Event(1.0, "use", 0), *(Event(1.0, *each) for each in (("produce", 1), ("produce", 2), ("use", 0), ("produce", 3)))]
    events += [Event(1.0, action, number) for number in (3, 2, 1) for action in ("use", "free")]
    asked = []

    def drop(view):
        able = [entry for entry in view.residents if entry.nbytes == 100]
        asked.append([entry.recompute_seconds for entry in able])
        return [Victim(entry, drop=entry.recompute_seconds is not None) for entry in able]

    found = replay(Trace("x", tuple(entries), tuple(events)), 210, drop, SLOW)
    assert asked == [[0.01, 0.01], [None]]
    assert (found.recomputations, found.bytes_out, found.bytes_in) == (1, 100, 110)
