"""The throttle: what is let through in a time is within the caps, and what isn't asked for is paid back."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laneway.memory.throttle import Throttle


def let_through(throttle: Throttle, sizes: list[int], until: float, seconds: float = 0.0) -> list[tuple[float, int]]:
    """(time, bytes) of transfers that begin as early as the throttle lets them, each taking ``seconds``."""
    now, begun = 0.0, []
    for nbytes in sizes:
        while (delay := throttle.delay(now)) > 0.0:
            now += max(delay, 1e-9)
            if now > until:
                return begun
        throttle.pay(nbytes, now, seconds)
        begun.append((now, nbytes))
        now += seconds
    return begun


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 1000), min_size=40, max_size=80),
    st.floats(50, 5000),
    st.floats(1, 50),
    st.sampled_from([0.0, 0.05, 0.5]),
)
def test_both_caps_hold_over_every_span(sizes: list[int], rate: float, operations: float, burst: float) -> None:
    throttle = Throttle(rate, operations, burst=burst)
    begun = let_through(throttle, sizes, until=5.0)
    for first in range(0, len(begun), 7):
        for last in range(first, len(begun), 11):
            span = begun[last][0] - begun[first][0]
            allowed = (span + burst) * (1 + 1e-9) + 1e-6
            assert sum(n for _, n in begun[first:last]) <= allowed * rate + 1000
            assert last - first <= allowed * operations + 1


def test_each_cap_counts_by_itself() -> None:
    """One large transfer, then many small ones in the time that it takes of the cap on bytes: the caps don't add up."""
    throttle = Throttle(bytes_per_second=100.0, operations_per_second=10.0, burst=0.0)
    throttle.pay(100, 0.0)
    for _ in range(9):
        throttle.pay(0, 0.0)
    assert throttle.delay(0.0) == pytest.approx(1.0)


def test_the_whole_rate_is_used() -> None:
    begun = let_through(Throttle(bytes_per_second=1000.0, burst=0.0), [10] * 5000, until=10.0)
    assert sum(n for _, n in begun) == pytest.approx(10_000, rel=0.01)


@pytest.mark.parametrize("reservation", [0.25, 0.5, 0.9])
def test_a_collective_takes_its_share_of_the_cap(reservation: float) -> None:
    begun = let_through(Throttle(1000.0, reservation=reservation, busy=lambda: True, burst=0.0), [10] * 5000, until=10.0)
    assert sum(n for _, n in begun) == pytest.approx(10_000 * (1 - reservation), rel=0.01)


@pytest.mark.parametrize("reservation", [0.25, 0.5, 0.9])
def test_without_a_cap_a_collective_takes_its_share_of_the_link(reservation: float) -> None:
    seconds = 0.01
    begun = let_through(Throttle(reservation=reservation, busy=lambda: True), [10] * 5000, until=10.0, seconds=seconds)
    assert len(begun) * seconds == pytest.approx(10 * (1 - reservation), rel=0.02)
    idle = let_through(Throttle(reservation=reservation, busy=lambda: False), [10] * 500, until=10.0, seconds=seconds)
    assert len(idle) == 500


def test_everything_reserved_means_nothing_begins_until_the_collective_is_over() -> None:
    flying = True
    throttle = Throttle(reservation=1.0, busy=lambda: flying)
    assert throttle.delay(3.0) == float("inf")
    flying = False
    assert throttle.delay(3.0) == 0.0


def test_unused_allowance_is_saved_up_to_the_burst_only() -> None:
    throttle = Throttle(bytes_per_second=100.0, burst=0.5)
    throttle.pay(10, 0.0)
    assert throttle.delay(1000.0) == 0.0
    throttle.pay(50, 1000.0)
    assert throttle.delay(1000.0) == 0.0
    throttle.pay(1, 1000.0)
    assert throttle.delay(1000.0) == pytest.approx(0.01)


def test_what_goes_ahead_unasked_is_paid_back() -> None:
    throttle = Throttle(bytes_per_second=100.0, burst=0.0)
    throttle.pay(500, 0.0)
    assert throttle.delay(0.0) == pytest.approx(5.0)
    assert throttle.delay(random.uniform(0.0, 4.9)) > 0.0
    assert throttle.delay(5.0) == 0.0
