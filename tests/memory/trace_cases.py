"""Random traces, and the least loads that any choice of victims can reach, found by trying all."""

from __future__ import annotations

from functools import cache

from hypothesis import strategies as st

from laneway.memory.trace import Entry, Event, Trace


@st.composite
def traces(draw, least=1, most=4, largest=40):
    """Training-like steps: parameters, experts that skip steps, their state, activations in any order, some recomputable."""
    names = draw(st.integers(1, 3))
    kinds = draw(st.lists(st.sampled_from(["parameter", "expert"]), min_size=names, max_size=names))
    entries = [Entry(draw(st.integers(1, largest)), kind, f"m{i}", i) for i, kind in enumerate(kinds)]
    entries += [Entry(draw(st.integers(1, largest)), "optimizer", f"m{i}", i) for i in range(names)]
    gap = st.sampled_from([0.0, 1e-3, 2e-2, 0.3])
    other = st.integers(0, 10)
    events, starts = [], []
    for _ in range(draw(st.integers(least, most))):
        starts.append(len(events))
        made = []
        taking_part = [module for module in range(names) if kinds[module] == "parameter" or draw(st.booleans())] or [0]
        for module in taking_part:
            events.append(Event(draw(gap), "use", module, draw(other)))
            for _ in range(draw(st.integers(0, 2))):
                number = len(entries)
                inputs = (module,) if draw(st.booleans()) else ()
                seconds = draw(st.sampled_from([1e-4, 3e-3])) if inputs else None
                entries.append(Entry(draw(st.integers(1, largest)), "activation", f"m{module}", module, seconds, inputs))
                events.append(Event(draw(gap), "produce", number, draw(other)))
                made.append(number)
        for number in draw(st.permutations(made)):
            events.append(Event(draw(gap), "use", number, draw(other)))
            events.append(Event(draw(gap), "free", number, draw(other)))
        for module in taking_part:
            events.append(Event(draw(gap), "use", module, draw(other)))
            events.append(Event(0.0, "use", names + module, draw(other)))
            events.append(Event(1e-3, "produce", module, draw(other)))
            events.append(Event(0.0, "produce", names + module, draw(other)))
    return Trace("random", tuple(entries), tuple(events), tuple(starts))


@st.composite
def unit_traces(draw):
    """Accesses to a few entries of one size that all exist before; every event is an operation of its own."""
    count = draw(st.integers(2, 5))
    uses = draw(st.lists(st.integers(0, count - 1), min_size=3, max_size=12))
    used = sorted(set(uses))
    events = [Event(1e-3, "use", used.index(number)) for number in uses]
    for number in draw(st.lists(st.sampled_from(range(len(used))), unique=True, max_size=2)):
        last = max(index for index, event in enumerate(events) if event.entry == number)
        events.insert(draw(st.integers(last + 1, len(events))), Event(1e-3, "free", number))
    return Trace("unit", tuple(Entry(1, "parameter") for _ in used), tuple(events))


def fewest_loads(trace: Trace, slots: int) -> int:
    """Loads on demand with ``slots`` entries of one size in fast memory, over every choice of victims."""

    @cache
    def least(index: int, there: frozenset[int]) -> int:
        if index == len(trace.events):
            return 0
        event = trace.events[index]
        if event.action == "free":
            return least(index + 1, there - {event.entry})
        if event.entry in there:
            return least(index + 1, there)
        if len(there) < slots:
            return 1 + least(index + 1, there | {event.entry})
        return 1 + min(least(index + 1, there - {victim} | {event.entry}) for victim in there)

    return least(0, frozenset())
