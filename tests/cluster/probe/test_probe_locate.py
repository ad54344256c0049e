"""Which link is slow: on random networks with shuffled ranks, a link that was made slow is the one that is named."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laneway.cluster.probe.locate import Link, Tree, locate
from laneway.cluster.probe.paths import busiest, pairs, slots
from laneway.cluster.reduce.places import find_places


@st.composite
def trees(draw, least_racks=1, least_hosts=1, least_ranks=1):
    racks = draw(st.integers(least_racks, 4))
    shape = [[draw(st.integers(least_ranks, 3)) for _ in range(draw(st.integers(least_hosts, 3)))] for _ in range(racks)]
    positions = [(rack, host) for rack, hosts in enumerate(shape) for host, ranks in enumerate(hosts) for _ in range(ranks)]
    return Tree(find_places(draw(st.permutations(positions))))


@given(trees())
def test_pairs_pass_every_link_and_a_slot_none_twice(tree):
    wanted = pairs(tree)
    world = len(tree.places.order)
    hosts = tree.wholes[0]
    passed = set().union(*(tree.links(pair) for pair in wanted)) if wanted else set()
    if world > 1:
        assert {rank for pair in wanted for rank in pair} == set(range(world))
        for host in hosts:
            assert len(hosts) == 1 or Link(1, host) in passed
    found = slots(tree, wanted)
    assert sorted(index for slot in found for index in slot) == list(range(len(wanted)))
    for slot in found:
        here = [link for index in slot for link in tree.links(wanted[index])]
        assert len(here) == len(set(here))
    assert len(found) >= busiest(tree, wanted)


@given(st.data())
def test_the_slow_link_is_named(data):
    """nccl#820: one slow member of a level is that member, not the level."""
    tree = data.draw(trees(least_racks=3, least_hosts=2, least_ranks=2))
    wanted = pairs(tree)
    links = sorted(set().union(*(tree.links(pair) for pair in wanted)))
    slow = data.draw(st.sampled_from([link for link in links if not (link.own and link.level == 0)]))
    crossing = [pair for pair in wanted if slow in tree.links(pair)]
    found = locate(tree, crossing, [pair for pair in wanted if slow not in tree.links(pair)])
    assert len(found) == 1
    assert slow in (found[0].link, *found[0].also)
    if not slow.own or slow.level:  # a pair of two members can't tell which of them it is
        tied = {link for link in (found[0].link, *found[0].also) if set(crossing) == {p for p in wanted if link in tree.links(p)}}
        assert tied == {found[0].link, *found[0].also}
    assert found[0].slow == len(crossing)


def test_names_of_two_racks_of_two_hosts_in_any_order():
    tree = Tree(find_places([(0, 1), (1, 0), (0, 0), (1, 1), (0, 1), (1, 0), (0, 0), (1, 1)]))
    assert tree.wholes == (((2, 6), (0, 4), (1, 5), (3, 7)), ((2, 6, 0, 4), (1, 5, 3, 7)), ((2, 6, 0, 4, 1, 5, 3, 7),))
    wanted = pairs(tree)

    def named(link):
        slow = [pair for pair in wanted if link in tree.links(pair)]
        return [str(each) for each in locate(tree, slow, set(wanted) - set(slow))]

    assert named(Link(1, (0, 4))) == ["host of ranks 0, 4"]
    assert named(Link(2, (2, 6, 0, 4))) == ["rack of ranks 1, 3, 5, 7 or rack of ranks 0, 2, 4, 6"]
    assert named(Link(1, (7,), True))[0].startswith("rank")


def test_collectives_of_groups_name_the_host():
    """As the groups of two racks of two hosts of two ranks see it: host 1 of rack 0 has a slow link."""
    tree = Tree(find_places([(0, 0), (0, 0), (0, 1), (0, 1), (1, 0), (1, 0), (1, 1), (1, 1)]))
    (_, middle, outer) = tree.places.groups
    slow = [group for group in (*middle, *outer) if set(group) & {2, 3}]
    found = locate(tree, slow, [group for group in (*middle, *outer) if group not in slow])
    assert [str(each) for each in found] == ["host of ranks 2-3"]


def test_two_slow_links_are_both_named():
    tree = Tree(find_places([(rack, host) for rack in range(3) for host in range(3)]))
    wanted, bad = pairs(tree), {Link(1, (1,)), Link(2, (6, 7, 8))}
    slow = [pair for pair in wanted if bad & tree.links(pair)]
    found = locate(tree, slow, [pair for pair in wanted if pair not in slow])
    assert bad <= {link for each in found for link in (each.link, *each.also)}
    assert len(found) == 2


@pytest.mark.parametrize("positions", [[()], [(), ()], [(0,), (1,)], [(0, 0), (0, 0), (0, 1)]])
def test_small_worlds(positions):
    tree = Tree(find_places(positions))
    assert len(pairs(tree)) >= len(positions) - 1
    assert locate(tree, [], []) == []
