"""Who is lost, as one rank decides it; whether a process exists; and names that a former start's processes don't share."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from laneway.cluster.recover import CutOffError, LostContactError, MinorityError, Watch
from laneway.cluster.recover.attempt import agree_on_name, attempt_store
from laneway.cluster.recover.errors import describe
from laneway.cluster.recover.members import Member, address_towards
from laneway.cluster.recover.tether import Prober, Tether
from laneway.cluster.recover.verdict import Call, Limits, Sighting, Verdict, judge, suspects
from laneway.core import InputError, LanewayError

LIMITS = Limits(10.0)
ages = st.floats(0, 30, allow_nan=False)
sightings = st.builds(Sighting, ages, st.integers(0, 40), st.booleans(), st.booleans())
worlds = st.dictionaries(st.integers(1, 20), sightings, min_size=1)
calls = st.none() | st.builds(Call, st.integers(0, 20), st.text())


def decided(seen: dict[int, Sighting], gone: set[int], call: Call | None) -> Verdict | None:
    asked = suspects(seen, call, LIMITS)
    return judge(0, seen, sorted(gone & set(asked)), asked, call, LIMITS)


@given(worlds, st.sets(st.integers(1, 20)), calls)
def test_only_the_silent_and_the_gone_are_lost(seen, gone, call):
    found = decided(seen, gone, call)
    if found is None:
        return
    for ident in found.lost:
        assert ident in gone or seen[ident].age >= LIMITS.limit - 2 * LIMITS.beat
        assert not seen[ident].left
    if not found.lost:
        assert call is not None
        assert (found.by, found.why) == (call.by, call.text)
        assert all(sighting.answered or sighting.left for sighting in seen.values())


@given(worlds, st.sets(st.integers(1, 20)), calls)
def test_whoever_is_silent_for_the_limit_is_lost(seen, gone, call):
    silent = {ident for ident, s in seen.items() if s.age >= LIMITS.limit and s.looks >= 4 and not s.left}
    found = decided(seen, gone, call)
    if silent:
        assert found is not None
        assert silent <= set(found.lost)


@given(st.dictionaries(st.integers(1, 20), st.builds(Sighting, st.floats(0, 2.9), st.integers(0, 9)), min_size=1))
def test_ranks_in_time_are_left_alone(seen):
    assert suspects(seen, None, LIMITS) == []
    assert decided(seen, set(seen), None) is None


def test_a_roll_call_waits_for_those_who_may_be_alive():
    seen = {1: Sighting(0.5, 1, answered=True), 2: Sighting(0.9, 1), 3: Sighting(0.9, 1)}
    call = Call(1, "RuntimeError: closed")
    assert decided(seen, {3}, call) is None  # 2 exists and has not had its turn
    assert decided(seen, {2, 3}, call) == Verdict((2, 3), 0, "their processes are gone", (2, 3))
    seen = dict.fromkeys((1, 2, 3), Sighting(0.5, 1, answered=True))
    assert decided(seen, set(), call) == Verdict((), 1, "RuntimeError: closed")


def test_a_rank_gives_up_before_the_others_give_it_up():
    for limit in (0.5, 1.0, 10.0, 600.0):
        limits = Limits(limit)
        assert limits.beat < limits.late < limits.fence < limits.limit
        assert limits.beat <= 1.0


def member(rank: int, tether: Tether, machine: str = "here") -> Member:
    return Member(rank, rank, "host", machine, os.getpid(), "127.0.0.1", tether.port)


def test_a_process_is_gone_only_where_it_was_there_before():
    tethers = [Tether("127.0.0.1") for _ in range(3)]
    members = [member(rank, tether) for rank, tether in enumerate(tethers)]
    prober = Prober("here")
    prober.meet(members[:2], 1.0)
    assert prober.reached == {0, 1}
    for tether in (tethers[1], tethers[2]):
        tether.close()
    assert prober.gone(members, 1.0) == {1}  # 2 was never reached: its address may lead elsewhere
    elsewhere = Prober("there")
    elsewhere.meet(members, 1.0)
    assert elsewhere.reached == set()  # another machine's loopback
    tethers[0].drain()
    tethers[0].close()


def test_a_frozen_process_is_not_gone():
    tether = Tether("127.0.0.1")
    pid = os.fork()
    if pid == 0:
        time.sleep(30)
        os._exit(0)
    there = member(0, tether)
    tether.close()  # the child has it still
    prober = Prober("here")
    try:
        os.kill(pid, signal.SIGSTOP)
        prober.meet([there], 1.0)
        assert prober.reached == {0}
        assert prober.gone([there], 1.0) == set()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert prober.gone([there], 1.0) == {0}


def test_members_and_errors_in_words():
    tether = Tether(address_towards("127.0.0.1", 1))
    members = [member(rank, tether) for rank in range(12)]
    assert Member.from_json(members[3].to_json()) == members[3]
    assert describe(members[2:3], 12) == f"rank 2 of 12 on host host (process {os.getpid()})"
    assert describe(members[:10], 12) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more on host host of 12 ranks"
    assert issubclass(CutOffError, LostContactError)
    assert issubclass(MinorityError, LanewayError)
    tether.close()


def names(store: dist.TCPStore, ranks: range, size: int, found: dict[int, str], seconds: float = 20) -> list[threading.Thread]:
    def ask(rank: int) -> None:
        own = dist.TCPStore("127.0.0.1", store.port, None, False, wait_for_workers=False)
        found[rank] = agree_on_name(own, rank, size, timedelta(seconds=seconds))

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    return threads


def test_each_start_has_a_name_of_its_own_also_after_one_that_died_half_way():
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    store.set("hello/1", "a process that died before it was answered")
    seen: set[str] = set()
    for size in (4, 4, 2):
        found: dict[int, str] = {}
        for thread in names(store, range(size), size, found):
            thread.join(20)
        assert len(set(found.values())) == 1
        assert len(found) == size
        seen |= set(found.values())
    assert len(seen) == 3


def test_ranks_that_do_not_come_are_named():
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    with pytest.raises(LanewayError, match="ranks have not come: 1, 2 of 3"):
        agree_on_name(store, 0, 3, timedelta(seconds=0.2))
    with pytest.raises(LanewayError, match="rank 1 of 3: rank 0 did not answer"):
        agree_on_name(store, 1, 3, timedelta(seconds=0.2))
    with pytest.raises(LanewayError, match=r"ranks have not come: 1 of 2"):
        Watch(dist.PrefixStore("w", store), 0, 2, timeout=timedelta(seconds=0.2))


def test_torch_serves_its_own_store_where_no_agent_does(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    assert attempt_store(0, 2) is None


@pytest.mark.parametrize("limit", [0, -1.0, float("inf"), True, "1"])
def test_a_limit_is_seconds(limit):
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    with pytest.raises(InputError, match="limit: got"):
        Watch(store, 0, 1, limit=limit)


def test_a_watch_over_one_rank_runs_calls_and_ends():
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    with Watch(dist.PrefixStore("w", store), 0, 1, limit=1.0) as watch:
        assert watch.watched(divmod, 7, 2) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            watch.watched(divmod, 7, 0)
        with pytest.raises(LanewayError, match="nothing to regroup for"):
            watch.next_world()
        assert watch.failure is None
    assert not watch._beat.thread.is_alive()
    with socket.socket() as asked:
        assert asked.connect_ex((watch.members[0].address, watch.members[0].port)) != 0
