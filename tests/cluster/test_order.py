"""Rank order: by number, with the fewest crossings; and what doesn't fit a topology is found and put right."""

from __future__ import annotations

import random
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laneway.cluster.catalogue import device
from laneway.cluster.hosts import Host, Identity, informative, topology_of_hosts
from laneway.cluster.order import Placement, crossings, natural_key, rank_order, verify_order
from laneway.cluster.topology import Topology
from laneway.core import InputError


def test_numbers_count_as_numbers():
    hosts = ["node66.dc.example", "node7.dc.example", "node70.dc.example", "node8.dc.example"]
    assert [hosts[i] for i in rank_order(hosts)] == [hosts[1], hosts[3], hosts[0], hosts[2]]
    assert sorted(hosts) != [hosts[i] for i in rank_order(hosts)]
    assert natural_key("a2b10") < natural_key("a2b11") < natural_key("a10b1") < natural_key("b1")
    assert natural_key("n" + "9" * 5000) > natural_key("n9")
    assert rank_order(["10.0.0.10", "10.0.0.9", "10.0.0.100"]) == (1, 0, 2)


@given(st.lists(st.integers(0, 10**6), unique=True, min_size=1), st.integers(1, 9), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=50)
def test_natural_order_is_the_order_of_the_numbers(numbers, width, rng):
    hosts = [f"gpu-{n:0{width}d}.site" for n in numbers]
    rng.shuffle(hosts)
    ordered = [hosts[i] for i in rank_order(hosts)]
    assert [int(h.split("-")[1].split(".")[0]) for h in ordered] == sorted(numbers)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 99)), min_size=1, max_size=6, unique_by=lambda pair: pair[1]))
@settings(deadline=None, max_examples=60)
def test_crossings_are_the_fewest_of_all_orders(placed):
    racks = {f"node{n}": f"rack{r}" for r, n in placed}
    hosts = list(racks)
    order = rank_order(hosts, racks)
    assert sorted(order) == list(range(len(hosts)))
    count = crossings([racks[hosts[i]] for i in order])
    assert count == min(crossings([racks[h] for h in some]) for some in permutations(hosts))
    different = len(set(racks.values()))
    assert count == (different if different > 1 else 0)


@given(st.data(), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
@settings(deadline=None, max_examples=60)
def test_every_level_comes_together_and_a_hosts_ranks_keep_their_order(data, zones, racks, each):
    paths = {f"n{z}-{r}-{i}": (f"z{z}", f"r{r}") for z in range(zones) for r in range(racks) for i in range(each)}
    ranks = data.draw(st.permutations([host for host in paths for _ in range(2)]))
    order = rank_order(ranks, paths)
    inner = [paths[ranks[i]] for i in order]
    assert crossings(inner) == (zones * racks if zones * racks > 1 else 0)
    assert crossings([path[0] for path in inner]) == (zones if zones > 1 else 0)
    assert crossings([ranks[i] for i in order]) == (len(paths) if len(paths) > 1 else 0)
    for host in paths:
        own = [i for i in order if ranks[i] == host]
        assert own == sorted(own)


def test_a_host_without_a_rack_is_named():
    with pytest.raises(InputError, match="node9"):
        rank_order(["node1", "node9"], {"node1": "a"})


def identities(hosts: list[str], racks: dict[str, tuple[str, ...]] | None = None) -> list[Identity]:
    return [Identity(f"{host}/boot", host, (racks or {}).get(host, ())) for host in hosts]


def assert_fits(placement: Placement, where: list[Identity]) -> None:
    topology = placement.topology
    assert sorted(placement.order) == list(range(topology.world))
    for group in placement.groups(0):
        assert len({where[rank].machine for rank in group}) == 1
    for level in range(1, len(topology.levels) - 1):
        for group in placement.groups(level):
            assert len({where[rank].path[: len(where[rank].path) - level + 1] for rank in group}) == 1
    again = verify_order([where[rank] for rank in placement.order], topology)
    assert again.matches


def test_ranks_in_order_match():
    topology = Topology.parse("2xH100_3nodes")
    placement = verify_order(identities(["b", "b", "a", "a", "c", "c"]), topology)
    assert placement.matches
    assert placement.order == (0, 1, 2, 3, 4, 5)
    assert placement.groups(0) == ((0, 1), (2, 3), (4, 5))


def test_interleaved_ranks_are_found_and_put_right():
    topology = Topology.parse("2xH100_2nodes")
    where = identities(["node7", "node66", "node7", "node66"])
    placement = verify_order(where, topology)
    assert not placement.matches
    assert "run on node7, node66" in placement.problems[0]
    assert placement.groups(0) == ((0, 2), (1, 3))
    assert_fits(placement, where)


def test_hosts_in_spelling_order_cross_racks_and_are_put_right():
    racks = {f"node{n}": ("rack0" if n < 10 else "rack1",) for n in (7, 8, 66, 70)}
    where = identities(sorted(["node66", "node7", "node70", "node8"]), racks)
    topology = Topology.parse("1xH100_2nodes_2racks")
    placement = verify_order(where, topology)
    assert any("several racks" in problem for problem in placement.problems)
    assert any("crosses between racks 4 times, 2 would do" in problem for problem in placement.problems)
    assert placement.order == (1, 3, 0, 2)
    assert_fits(placement, where)
    flat = verify_order(where, Topology.parse("1xH100_4nodes"))
    assert flat.order == (1, 3, 0, 2)


def test_named_hosts_are_laid_out_as_the_topology_says():
    topology = Topology.parse({"topology": "2xH100_2nodes", "hosts": ["z", "a"]})
    placement = verify_order(identities(["a", "a", "z", "z"]), topology)
    assert "should run on z but run on a" in placement.problems[0]
    assert placement.order == (2, 3, 0, 1)
    with pytest.raises(InputError, match="missing: z; not in it: b"):
        verify_order(identities(["a", "a", "b", "b"]), topology)
    with pytest.raises(InputError, match="2 ranks on it"):
        verify_order(identities(["a", "a", "a", "z"]), topology)


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[Host], int]:
    zones = draw(st.integers(1, 3))
    hosts = []
    for zone in range(zones):
        for rack in range(draw(st.integers(1, 3))):
            for _ in range(draw(st.integers(1, 3))):
                number = draw(st.integers(0, 999)) * 100 + len(hosts)
                hosts.append(Host(f"n{number}", draw(st.integers(1, 3)), (f"z{zone}", f"r{rack}")))
    return hosts, zones


@given(clusters(), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=80)
def test_any_shuffle_of_ranks_is_put_right(cluster, rng):
    """A topology built from the hosts, and the same hosts' ranks in any order: groups fit, crossings are the fewest."""
    hosts, _ = cluster
    topology = topology_of_hosts(hosts, device("H100"))
    assert topology.world == sum(host.devices for host in hosts)
    where = [Identity(host.name, host.name, host.path) for host in hosts for _ in range(host.devices)]
    rng.shuffle(where)
    placement = verify_order(where, topology)
    assert sorted(placement.order) == list(range(topology.world))
    names = [where[rank].name for rank in placement.order]
    assert [len({where[rank].name for rank in group}) for group in placement.groups(0)] == [1] * len(hosts)
    if not placement.matches:
        assert list(dict.fromkeys(names)) == list(topology.hosts)
    for groups in informative([host.path for host in hosts]).values():
        number = {host.name: group for host, group in zip(hosts, groups, strict=True)}
        assert crossings([number[name] for name in names]) == len(set(groups))
    assert verify_order([where[rank] for rank in placement.order], topology).matches


@given(clusters(), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=60)
def test_a_nameless_topology_is_matched_by_shape(cluster, rng):
    hosts, _ = cluster
    named = topology_of_hosts(hosts, device("H100"))
    topology = Topology(named.device, named.levels)
    shuffled = list(hosts)
    rng.shuffle(shuffled)
    where = [Identity(host.name, host.name, host.path) for host in shuffled for _ in range(host.devices)]
    placement = verify_order(where, topology)
    for group in placement.groups(0):
        assert len({where[rank].name for rank in group}) == 1
    counts = [len(group) for group in placement.groups(0)]
    assert counts == list(topology.member_counts(0))
    assert verify_order([where[rank] for rank in placement.order], topology).matches


@pytest.mark.parametrize(
    ("hosts", "text", "why"),
    [
        (["a", "a", "b"], "2xH100_2nodes", "4 ranks"),
        (["a", "b", "a", "a"], "2xH100_2nodes", "2 with 3, 1 ranks"),
        (["a", "b", "c", "d"], "2xH100_2nodes", "4 with 1, 1, 1, 1 ranks"),
        (["a", "b"], "2xH100", "2 with 1, 1 ranks"),
    ],
)
def test_hosts_that_fit_in_no_order_are_refused(hosts, text, why):
    with pytest.raises(InputError) as caught:
        verify_order(identities(hosts), Topology.parse(text))
    assert why in str(caught.value)


def test_racks_that_fit_in_no_order_are_refused():
    racks = {"a": ("x",), "b": ("x",), "c": ("x",), "d": ("y",)}
    with pytest.raises(InputError, match="in 2 racks"):
        verify_order(identities(list("abcd"), racks), Topology.parse("1xH100_2nodes_2racks"))


def test_racks_nobody_knows_are_not_compared():
    where = identities(list("abcd"))
    assert verify_order(where, Topology.parse("1xH100_2nodes_2racks")).matches


def test_several_groups_on_one_machine_are_no_problem():
    assert verify_order(identities(["a"] * 4), Topology.parse("2xCPU_2nodes")).matches


def test_many_hosts_take_little_time():
    rng = random.Random(1)
    hosts = [f"node{n}" for n in range(4096)]
    racks = {host: (f"r{n // 16}",) for n, host in enumerate(hosts)}
    rng.shuffle(hosts)
    placement = verify_order(identities(hosts, racks), Topology.parse("1xH100_16nodes_256racks"))
    assert crossings([racks[hosts[rank]] for rank in placement.order]) == 256
    assert len(placement.problems) == 13
    assert placement.problems[-1].endswith(" more")
