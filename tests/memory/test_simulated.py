"""The simulated tier: every time is the one computed by hand, and what a slot holds is what was written to it."""

from __future__ import annotations

import pytest
from tiers import Ends, noise, same

from laneway.core import InputError, LanewayError
from laneway.memory.clock import VirtualClock
from laneway.memory.simulated import SimulatedTier
from laneway.memory.throttle import Throttle
from laneway.memory.tier import TierFullError


def make(throttle: Throttle | None = None, duplex: bool = True) -> SimulatedTier:
    """100 bytes/s out, 200 in, half a second of latency."""
    return SimulatedTier(VirtualClock(), 10_000, 100.0, 200.0, latency=0.5, duplex=duplex, throttle=throttle)


def test_transfers_of_one_direction_follow_each_other() -> None:
    tier, ends = make(), Ends()
    first, second = (tier.write(tier.allocate(n), None, ends) for n in (100, 300))
    assert first.wait() == 1.5
    assert (first.done, second.done, tier.clock.now()) == (True, False, 1.5)
    assert second.wait() == 3.5
    assert tier.clock.now() == 5.0
    assert first.wait() == second.wait() == 0.0
    assert ends.errors == [None, None]
    assert tier.busy_seconds == 5.0


def test_nothing_ends_before_its_time() -> None:
    tier, ends = make(), Ends()
    transfer = tier.write(tier.allocate(100), None, ends)
    tier.clock.advance(1.4375)
    tier.poll()
    assert not transfer.done
    tier.clock.advance(0.0625)
    assert not transfer.done  # only poll notices
    tier.poll()
    assert transfer.done
    assert ends.errors == [None]


@pytest.mark.parametrize(("duplex", "seconds"), [(True, 1.5), (False, 2.5)])
def test_a_read_waits_for_a_write_of_another_slot_only_half_duplex(duplex: bool, seconds: float) -> None:
    tier, ends = make(duplex=duplex), Ends()
    full, other = tier.allocate(200), tier.allocate(100)
    tier.write(full, noise(200), ends).wait()
    start = tier.clock.now()
    tier.write(other, None, ends)
    read = tier.read(full, noise(200), ends)
    read.wait()
    assert tier.clock.now() - start == (seconds + 0.5 if not duplex else seconds)


@pytest.mark.parametrize("urgent", [False, True])
def test_a_read_follows_the_write_of_its_slot(urgent: bool) -> None:
    tier, ends = make(), Ends()
    source, target = noise(200), noise(200)
    slot, other = tier.allocate(200), tier.allocate(100)
    tier.write(other, None, ends)  # under way until 1.5
    tier.write(slot, source, ends)  # until 4.0
    read = tier.read(slot, target, ends, urgent=urgent)  # until 5.5
    tier.clock.advance(3.9)
    tier.poll()
    assert not read.done
    read.wait()
    assert tier.clock.now() == 5.5
    assert same(source, target)


def test_a_waiter_takes_the_write_before_it_along() -> None:
    tier, ends = make(), Ends()
    slots = [tier.allocate(100) for _ in range(4)]
    for slot in slots:
        tier.write(slot, noise(100), ends)
    read = tier.read(slots[3], noise(100), ends)
    assert read.wait() == 1.5 + 1.5 + 1.0  # what is under way, the write that jumped the queue, the read


def test_waiting_jumps_the_queue() -> None:
    tier, ends = make(), Ends()
    transfers = [tier.write(tier.allocate(100), None, ends) for _ in range(4)]
    assert transfers[3].wait() == 3.0
    assert [t.done for t in transfers] == [True, False, False, True]


def test_urgent_reads_go_ahead() -> None:
    tier, ends = make(), Ends()
    slots = [tier.allocate(200) for _ in range(3)]
    reads = [tier.read(slot, None, ends) for slot in slots[:2]]
    urgent = tier.read(slots[2], None, ends, urgent=True)
    tier.clock.advance(3.0)
    tier.poll()
    assert [t.done for t in (*reads, urgent)] == [True, False, True]


def test_only_what_has_not_begun_can_be_cancelled() -> None:
    tier, ends = make(), Ends()
    slots = [tier.allocate(100) for _ in range(3)]
    begun, queued, last = (tier.write(slot, noise(100), ends) for slot in slots)
    assert not begun.cancel()
    assert queued.cancel()
    assert not queued.cancel()
    assert last.wait() == 3.0
    assert (tier.traffic.writes, tier.traffic.bytes_written) == (2, 200)
    assert ends.errors == [None, None]
    with pytest.raises(LanewayError, match="cancelled"):
        queued.wait()
    with pytest.raises(KeyError):
        tier.read(slots[1], noise(100), ends)


def test_the_throttle_delays_what_nobody_waits_for() -> None:
    tier, ends = make(Throttle(bytes_per_second=50.0, burst=0.0)), Ends()
    first, second, third = (tier.write(tier.allocate(100), None, ends) for _ in range(3))
    tier.clock.advance(3.4375)
    tier.poll()
    assert (first.done, second.done) == (True, False)  # the second begins at 2.0 and takes 1.5
    tier.clock.advance(0.0625)
    tier.poll()
    assert second.done
    assert third.wait() == 1.5  # asks nobody


def test_a_collective_reserves_its_share_without_a_cap() -> None:
    tier, ends = make(Throttle(reservation=0.5, busy=lambda: True)), Ends()
    transfers = [tier.write(tier.allocate(150), None, ends) for _ in range(4)]
    ended = []
    while len(ended) < 4:
        tier.clock.advance(0.125)
        tier.poll()
        ended += [tier.clock.now() for t in transfers[len(ended) :] if t.done]
    assert ended == [2.0, 6.0, 10.0, 14.0]


def test_a_released_slot_counts_until_its_transfer_has_ended() -> None:
    tier, ends = make(), Ends()
    slot = tier.allocate(9_000)
    transfer = tier.write(slot, noise(9_000), ends)
    tier.release(slot)
    with pytest.raises(TierFullError, match="2000"):
        tier.allocate(2_000)
    transfer.wait()
    assert tier.used == 0
    assert tier.allocate(10_000).nbytes == 10_000
    with pytest.raises(LanewayError, match="released"):
        tier.release(slot)


def test_ends_come_in_the_order_of_time() -> None:
    tier, order = make(), []
    written = tier.allocate(200)
    tier.write(written, None, lambda _: order.append("write"))
    tier.read(tier.allocate(200), None, lambda _: order.append("read"))
    tier.clock.advance(100.0)
    tier.poll()
    assert order == ["read", "write"]


def test_closing_ends_what_is_queued_with_an_error() -> None:
    tier, ends = make(), Ends()
    transfers = [tier.write(tier.allocate(100), None, ends) for _ in range(2)]
    tier.close()
    tier.close()
    assert [str(e) for e in ends.errors] == ["simulated tier: closed before a transfer ended"] * 2
    assert tier.used == 0
    with pytest.raises(LanewayError, match="closed"):
        transfers[0].wait()
    with pytest.raises(LanewayError, match="closed"):
        tier.allocate(1)


@pytest.mark.parametrize("field", ["write_bandwidth", "read_bandwidth"])
def test_a_link_without_bandwidth_is_refused(field: str) -> None:
    speeds = {"write_bandwidth": 1.0, "read_bandwidth": 1.0} | {field: 0.0}
    with pytest.raises(InputError, match=field):
        SimulatedTier(VirtualClock(), 10, **speeds)
