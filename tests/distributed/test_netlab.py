"""The network lab: rates, counters, shapes, faults, and that nothing of it is left behind."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import netlab_bodies as bodies
import pytest
from hypothesis import given
from hypothesis import strategies as st
from netlab import Lab, assert_bytes

from laneway.bench import netlab
from laneway.bench.netlab import Network
from laneway.core import InputError

WORKER = str(Path(__file__).with_name("netlab_worker.py"))
SMALL = Network.grid(2, 1, 2)
shapes = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple), min_size=1, max_size=4).map(tuple)


@given(shapes, st.sampled_from(["packed", "spread"]))
def test_every_rank_has_a_place_and_hosts_keep_their_ranks_together(shape, order):
    network = Network(shape, order=order)
    assert len(network.positions) == network.world == sum(map(sum, shape))
    for rack, hosts in enumerate(shape):
        for host, ranks in enumerate(hosts):
            mine = [rank for rank, place in enumerate(network.positions) if place == (rack, host)]
            assert mine == list(range(mine[0], mine[0] + ranks))
            assert [network.local(rank) for rank in mine] == list(range(ranks))
    assert len(set(network.links)) == 2 * (len(shape) + len(network.hosts))
    assert len({network.address(*place) for place in network.hosts}) == len(network.hosts)


def test_the_order_of_ranks():
    assert Network.grid(2, 2, 1).positions == ((0, 0), (0, 1), (1, 0), (1, 1))
    assert Network.grid(2, 2, 1, order="spread").positions == ((0, 0), (1, 0), (0, 1), (1, 1))
    assert Network(((1, 2), (1,)), order="spread").positions == ((0, 0), (1, 0), (0, 1), (0, 1))
    assert Network(((1, 2), (1,)), order=((1, 0), (0, 1), (0, 0))).positions == ((1, 0), (0, 1), (0, 1), (0, 0))


def test_rates_of_links():
    network = Network(host_mbit=100, rack_mbit=10, rates={"rack1": 5, "rack1.up": 4, "r0h1.in": 3})
    assert [network.rate(name) for name in ("rack0.up", "rack1.up", "rack1.down", "r0h1.in", "r0h1.out")] == [10, 4, 5, 3, 100]


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("shape", {"shape": ()}),
        ("shape", {"shape": ((2, 0),)}),
        ("shape", {"shape": ((),)}),
        ("host_mbit", {"host_mbit": 0}),
        ("rack_mbit", {"rack_mbit": float("nan")}),
        ("link", {"rates": {"rack7": 5}}),
        ("rates.rack1", {"rates": {"rack1": -5}}),
        ("order", {"order": "sprd"}),
        ("order", {"order": ((0, 0),)}),
    ],
)
def test_a_network_that_can_not_be(field, bad):
    with pytest.raises(InputError, match=f"^{field}: "):
        Network(**bad)


@pytest.mark.parametrize("body", ["no_colon", lambda context: None])
def test_a_body_that_ranks_could_not_import(body):
    with pytest.raises(InputError, match=r"^body: "):
        netlab.run(body)


@pytest.mark.parametrize("shape", [((2, 2), (2, 2)), ((1,), (2, 1), (1,)), ((3,),)])
def test_shapes(lab: Lab, shape):
    network = Network(shape, order="spread")
    found = lab.run(bodies.where, network)
    hosts = [netlab.host_name(*place) for place in network.positions]
    for rank, (number, place, host, numbers, _) in enumerate(found):
        rack, position = network.positions[rank]
        assert number == rank
        assert place == (rack, position, network.local(rank))
        assert host == hosts[rank]
        assert numbers == (rank, network.world, network.local(rank), shape[rack][position], network.hosts.index((rack, position)))
    assert len({drawn for *_, drawn in found}) == network.world


def test_a_transfer_is_counted_on_its_path_alone_and_never_faster_than_its_rate(lab: Lab):
    numbers, mbit = 1 << 19, 150.0
    network = Network.grid(2, 2, 1, rack_mbit=mbit)
    found = lab.run(bodies.transfer, network, {"source": 0, "target": 3, "numbers": numbers})
    seconds, counts, total = found[3]
    assert total == found[0][2]
    assert found[0][1] == counts
    assert seconds >= 0.95 * 4 * numbers * 8 / (mbit * 1e6)
    path = {"r0h0.out", "rack0.up", "rack1.down", "r1h1.in"}
    for link in path:
        assert_bytes(counts[link], 4 * numbers)
    back = {"r1h1.out", "rack1.up", "rack0.down", "r0h0.in"}  # acknowledgements
    assert all(counts[link] < 0.01 * 4 * numbers for link in back)
    assert all(count < 1000 for link, count in counts.items() if link not in path | back)


def test_each_direction_has_its_own_rate(lab: Lab):
    numbers, network = 1 << 16, Network.grid(1, 2, 1, rates={"r0h1.in": 5})
    slow = lab.run(bodies.transfer, network, {"source": 0, "target": 1, "numbers": numbers})[0][0]
    fast = lab.run(bodies.transfer, network, {"source": 1, "target": 0, "numbers": numbers})[0][0]
    floor = 0.8 * 4 * numbers * 8 / 5e6  # a burst goes free
    assert fast < floor < slow


@pytest.mark.parametrize("then", [600.0, 1.0])
def test_a_rate_changes_while_traffic_flows(lab: Lab, then):
    numbers, mbit = 1 << 16, 4.0
    network = Network.grid(2, 1, 1, rack_mbit=600, rates={"rack1": mbit})
    call = {"source": 0, "target": 1, "numbers": numbers, "mbit": then, "after": 0.2, "link": "rack1"}
    seconds = lab.run(bodies.transfer, network, call)[0][0]
    unchanged = 4 * numbers * 8 / (mbit * 1e6)
    assert seconds < 0.8 * unchanged if then > mbit else seconds > 1.2 * unchanged


@pytest.mark.parametrize(("order", "crossings"), [("packed", 1), ("spread", 2)])
def test_a_flat_ring_crosses_the_uplink_as_often_as_the_order_of_ranks_makes_it(lab: Lab, order, crossings):
    numbers, network = 1 << 18, Network.grid(order=order, rack_mbit=600)
    found = lab.run(bodies.all_reduce, network, {"numbers": numbers})
    payload = 4 * numbers * 2 * (network.world - 1) / network.world
    counts, _ = found[0]
    for rack in (0, 1):
        assert_bytes(counts[f"rack{rack}.up"], crossings * payload)
        assert_bytes(counts[f"rack{rack}.down"], crossings * payload)
    for place in network.hosts:
        assert_bytes(counts[netlab.host_name(*place) + ".out"], payload)
    assert max(error for _, error in found) < 1e-4


def test_coordination_puts_nothing_on_the_links(lab: Lab):
    assert set(lab.run(bodies.quiet, SMALL)[0].values()) == {0}


def test_a_rank_that_raises_ends_the_lab_with_its_traceback_and_output(lab: Lab):
    start = time.monotonic()
    with pytest.raises(netlab.RankFailed) as caught:
        lab.run(bodies.raises, SMALL, grace=0.3)
    failed = caught.value.failures
    assert sorted(failed) == [0, 1, 2, 3]
    assert failed[1].reason == "ValueError: rank one can't go on"
    assert "in raises" in failed[1].traceback
    assert "before the end" in failed[1].output
    assert "in raises" in failed[0].output  # the stack of one that was still running
    assert time.monotonic() - start < 30


def test_a_rank_that_hangs_hits_the_time_limit_with_its_stack(lab: Lab):
    with pytest.raises(netlab.TimeLimit) as caught:
        lab.run(bodies.hangs, SMALL, timeout=1.0)
    assert list(caught.value.failures) == [3]
    assert "in hangs" in caught.value.failures[3].output
    assert "did not end within 1 s" in str(caught.value)


@pytest.mark.parametrize(("how", "expected"), [("kill", "Connection"), ("stop", "Timed out"), ("cut", "Timed out")])
def test_what_others_see_of_a_rank_that_is_gone(lab: Lab, how, expected):
    network = Network.grid(2, 1, 2, rack_mbit=600)
    found = lab.run(bodies.dies, network, {"victim": 3, "how": how}, may_die=[3], timeout=30)
    assert expected in "".join(map(str, found[:3]))
    assert "nothing" not in found[:3]
    if how != "cut":  # the one behind a cut link sees the same as the others
        assert isinstance(found[3], netlab.Ended)
        assert found[3].signal == 9


def test_a_barrier_with_the_dead_fails_and_one_of_the_living_does_not(lab: Lab):
    found = lab.run(bodies.meets_the_dead, SMALL, may_die=[1])
    assert found[0] == "ranks [1] have ended and will not come"
    assert found[2:] == ["", ""]


def test_a_rank_is_stopped_and_goes_on(lab: Lab):
    assert lab.run(bodies.freezes, Network.grid(1, 2, 1))[0] == [False, True]


def test_nothing_is_left_when_the_runner_is_killed(lab: Lab, tmp_path: Path):
    devices = Path("/proc/net/dev").read_text("ascii").count("\n")
    code = (
        "from laneway.bench import netlab; "
        f"netlab.run('netlab_bodies:holds', netlab.Network.grid(2, 1, 1), {{'folder': {str(tmp_path)!r}}}, timeout=200)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen([sys.executable, "-c", code], env=env) as runner:
        try:
            _until(lambda: all((tmp_path / f"ready{rank}").exists() for rank in (0, 1)), 40)
        finally:
            runner.kill()
    for rank in (0, 1):
        with open(tmp_path / f"lock{rank}") as file:
            _until(lambda held=file: _locked(held), 10)
    assert Path("/proc/net/dev").read_text("ascii").count("\n") == devices


def _locked(file) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _until(holds, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.02)


TRY = """
from laneway.bench import netlab
try:
    print(sorted(set(netlab.run("netlab_bodies:quiet", netlab.Network.grid(1, 2, 1))[0].values())))
except netlab.Unavailable as missing:
    print(missing)
"""
FORBID = "echo 0 > /proc/sys/user/max_net_namespaces; "


def _try(*command: str) -> str:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([*command], env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _needs_user_namespaces() -> None:
    tried = subprocess.run(["unshare", "--user", "--map-root-user", "true"], capture_output=True, check=False)
    if tried.returncode:
        pytest.skip("user namespaces are not allowed on this machine")


def test_a_lab_needs_no_root(lab: Lab):
    _needs_user_namespaces()
    assert _try("unshare", "--user", "--map-user=1000", "--map-group=1000", sys.executable, "-c", TRY) == "[0]"


def test_where_no_lab_can_be_made_one_line_says_why():
    _needs_user_namespaces()
    script = f"{FORBID} exec {sys.executable} -c '{TRY}'"
    said = _try("unshare", "--user", "--map-root-user", "sh", "-c", script)
    assert said.startswith("the network lab needs Linux with CAP_SYS_ADMIN and CAP_NET_ADMIN or user namespaces")
    assert "as root: [Errno" in said
    assert "in a user namespace: [Errno" in said
    assert "\n" not in said


@pytest.mark.slow
@pytest.mark.parametrize(("required", "code", "word"), [("", 0, "skipped"), ("1", 1, "errors")])
def test_tests_skip_without_a_lab_and_fail_where_it_is_required(required, code, word, tmp_path):
    _needs_user_namespaces()
    test = "test_netlab.py::test_coordination_puts_nothing_on_the_links"
    script = f"{FORBID} exec {sys.executable} -m pytest -q -p no:cacheprovider {Path(__file__).with_name(test)}"
    env = {**os.environ, "LANEWAY_NETLAB_REQUIRED": required, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = ["unshare", "--user", "--map-root-user", "sh", "-c", script]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
    assert done.returncode == code, done.stdout
    assert f"1 {word[:5]}" in done.stdout
    assert "the network lab needs Linux with" in done.stdout


@pytest.mark.parametrize("rendezvous", ["static", pytest.param("c10d", marks=pytest.mark.slow)])
def test_torchrun_starts_an_agent_on_every_host(lab: Lab, rendezvous):
    network = Network(((2,), (1,)))
    found = lab.torchrun([WORKER, "run"], network, rendezvous=rendezvous, timeout=90)
    assert found.codes == {"r0h0": 0, "r1h0": 0}
    assert sorted(found.reports) == [0, 1, 2]
    hosts = [name for name, _, _, _ in found.reports.values()]
    assert sorted(hosts) == ["r0h0", "r0h0", "r1h0"]
    assert {(local, size) for name, local, size, _ in found.reports.values() if name == "r0h0"} == {("0", "2"), ("1", "2")}
    assert {total for *_, total in found.reports.values()} == {3.0}
    if rendezvous == "static":  # c10d numbers the hosts as it likes
        assert hosts == ["r0h0", "r0h0", "r1h0"]


@pytest.mark.slow
def test_torchrun_fails_with_what_the_workers_wrote(lab: Lab):
    with pytest.raises(netlab.RankFailed) as caught:
        lab.torchrun([WORKER, "fail"], Network.grid(2, 1, 1), timeout=90)
    assert "this worker gives up" in caught.value.failures["r1h0"].output


@pytest.mark.slow
def test_a_host_is_killed_under_torchrun(lab: Lab):
    with pytest.raises(netlab.RankFailed) as caught:
        lab.torchrun([WORKER, "kill_host"], Network.grid(2, 1, 1), timeout=90, grace=60, may_die=["r1h0"])
    assert list(caught.value.failures) == ["r0h0"]
    assert "Connection" in caught.value.failures["r0h0"].output
