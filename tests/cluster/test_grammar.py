"""The short form of a topology: what it means, what is refused and where, and that what is written is read back the same."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laneway.cluster.catalogue import DEVICES, NETWORKS
from laneway.cluster.grammar import GRAMMAR, LARGEST, parse_topology
from laneway.cluster.levels import WORDS
from laneway.cluster.short_form import format_topology
from laneway.cluster.topology import Level, Topology
from laneway.core import InputError


def test_nodes():
    t = Topology.parse("8xH100_32nodes")
    assert (t.world, t.device.name, [level.size for level in t.levels]) == (256, "H100", [8, 32])
    assert [level.network for level in t.levels] == ["NVLink4", "NDR400"]
    assert t.levels[1].links == 8
    assert t.bandwidth_per_device(1) == pytest.approx(48.5e9)
    assert t.bandwidth_per_device(0) == pytest.approx(370.8e9)


def test_nodes_are_counted_in_each_rack():
    t = Topology.parse("8xH100_16nodes_4racks@NDR400/400GbE:4")
    assert (t.world, t.members(1), t.members(2)) == (512, 64, 4)
    assert [level.network for level in t.levels] == ["NVLink4", "NDR400", "400GbE"]
    assert t.levels[2].oversubscription == 4
    assert t.bandwidth_per_device(2) == pytest.approx(45e9 / 4)
    text = t.describe()
    for part in ("512 devices", "16 nodes in each of 4 racks, 64 in all", "8 devices in each of 64 nodes", "4:1 oversubscribed"):
        assert part in text


def test_a_single_node_and_links_of_a_node():
    assert Topology.parse("8xA100").world == 8
    assert len(Topology.parse("8xA100").levels) == 1
    t = Topology.parse("8xA100_4nodes@4xHDR200")
    assert t.levels[1].links == 4
    assert t.bandwidth_per_device(1) == pytest.approx(4 * 25e9 * 0.97 / 8)
    assert Topology.parse("8xMI300X_2nodes@xGMI/2xNDR400:1.5").levels[1].oversubscription == 1.5


def test_a_fabric_without_a_network_goes_on_without_a_bottleneck():
    t = Topology.parse("8xH100_16nodes_4racks@4xHDR200")
    assert (t.levels[2].network, t.levels[2].links) == ("HDR200", 64)
    assert t.bandwidth_per_device(2) == pytest.approx(t.bandwidth_per_device(1))
    slow = Topology.parse("8xH100_16nodes_4racks@25GbE")
    assert slow.levels[1].links == 1
    assert slow.bandwidth_per_device(2) == pytest.approx(slow.bandwidth_per_device(1))
    assert Topology.parse("8xH100_16nodes_4racks@4xHDR200/HDR200").levels[2].links == 64


def test_many_levels_and_trust():
    t = Topology.parse("8xH100_16nodes_4racks_2sites_3clouds")
    assert t.world == 8 * 16 * 4 * 2 * 3
    assert [level.trusted for level in t.levels] == [True, True, True, False, False]
    assert [level.member for level in t.levels] == ["device", "node", "rack", "site", "cloud"]
    assert Topology.parse("1xCPU_1node_5homes").levels[2].network == "Broadband"


def test_ragged_nodes():
    t = Topology.parse("8xH100_3nodes+4xH100_1node")
    assert (t.world, t.levels[0].counts, t.levels[0].size, t.levels[1].size) == (28, (8, 8, 8, 4), 8, 4)
    assert t.groups(0)[-1] == (24, 25, 26, 27)
    assert t.groups(1) == (tuple(range(28)),)
    assert Topology.parse("8xH100_3nodes+8xH100_2nodes") == Topology.parse("8xH100_5nodes")


def test_ragged_racks():
    t = Topology.parse("8xH100_16nodes_3racks+8xH100_12nodes_1rack")
    assert (t.world, t.levels[0].counts, t.levels[1].counts, t.levels[2].size) == (8 * 60, None, (16, 16, 16, 12), 4)
    assert [len(group) for group in t.groups(1)] == [128, 128, 128, 96]
    t = Topology.parse("8xH100_2nodes_1rack+4xH100_3nodes_2racks")
    assert (t.levels[0].counts, t.levels[1].counts, t.world) == ((8, 8, 4, 4, 4, 4, 4, 4), (2, 3, 3), 40)
    assert str(t) == "8xH100_2nodes_1rack+4xH100_3nodes_2racks"


WRONG = [
    # text, position of the offending part (from 1), the part, a word of the reason
    ("", 1, None, "nothing"),
    (" ", 1, " ", "spaces"),
    ("8xH100 _2nodes", 7, " ", "spaces"),
    ("8xH100_2nodes\n", 14, "\n", "spaces"),
    ("٨xH100", 1, "٨", "ASCII"),
    ("8xH100_²nodes", 8, "²", "ASCII"),
    ("8×H100", 2, "×", "ASCII"),
    ("8xH100_2nodes!", 14, "!", "ASCII"),
    ("H100", 1, "H100", "an x"),
    ("8H100_2nodes", 1, "8H100", "an x"),
    ("xH100", 1, "xH100", "an x"),
    ("8x", 1, "8x", "an x"),
    ("8x_2nodes", 1, "8x", "an x"),
    ("0xH100", 1, "0", "at least 1"),
    ("-8xH100", 1, "-8xH100", "an x"),
    ("8.5xH100", 1, "8.5xH100", "an x"),
    ("8xV100_2nodes", 3, "V100", "unknown device"),
    ("8xH10", 3, "H10", "did you mean H100"),
    ("8xH100_0nodes", 8, "0", "at least 1"),
    ("8xH100_000nodes", 8, "000", "at least 1"),
    ("8xH100_-2nodes", 8, "-2nodes", "a count"),
    ("8xH100_2", 8, "2", "a count"),
    ("8xH100_nodes", 8, "nodes", "a count"),
    ("8xH100_", 8, None, "a count"),
    ("8xH100__2nodes", 8, None, "a count"),
    ("8xH100_2nodesfoo", 9, "nodesfoo", "nodes"),
    ("8xH100_2nods", 9, "nods", "did you mean nodes"),
    ("8xH100_2racks", 9, "racks", "nodes come first"),
    ("8xH100_2nodes_3nodes", 16, "nodes", "each word once"),
    ("8xH100_2nodes_3sites_2racks", 23, "racks", "from the inside outwards"),
    ("8xH100_2nodes_3quux", 16, "quux", "one of"),
    (f"{'9' * 400}xH100", 1, None, "at most"),
    (f"8xH100_{LARGEST + 1}nodes", 8, str(LARGEST + 1), "at most"),
    (f"8xH100_{LARGEST}nodes", 1, f"8xH100_{LARGEST}nodes", "devices in all"),
    ("1xH100_1000nodes_1000racks+1xH100_1node_1rack", 1, None, "devices in all"),
    ("8xH100_2nodes@", 15, None, "network is expected"),
    ("8xH100_2nodes@NDR40", 15, "NDR40", "did you mean NDR400"),
    ("8xH100_2nodes@4x", 15, "4x", "network is expected"),
    ("8xH100_2nodes@0xNDR400", 15, "0", "at least 1"),
    ("8xH100_2nodes@0GbE", 15, "0GbE", "above 0"),
    ("8xH100_2nodes@NDR400:0", 22, "0", "oversubscription"),
    ("8xH100_2nodes@NDR400:0.5", 22, "0.5", "oversubscription"),
    ("8xH100_2nodes@NDR400:", 22, None, "oversubscription"),
    ("8xH100_2nodes@NDR400:-1", 22, "-1", "oversubscription"),
    ("8xH100_2nodes@NDR400:inf", 22, "inf", "oversubscription"),
    ("8xH100_2nodes@NDR400:1e2", 22, "1e2", "oversubscription"),
    ("8xH100_2nodes@NDR400:2:2", 22, "2:2", "oversubscription"),
    ("8xH100_2nodes@NDR400/25GbE", 22, "25GbE", "too many networks"),
    ("8xH100@NDR400", 8, "NDR400", "nothing is outside"),
    ("8xH100_2nodes@NVLink4/NDR400/NDR400", 30, "NDR400", "too many networks"),
    ("8xH100_2nodes@NDR400/", 22, None, "network is expected"),
    ("8xH100_2nodes@NDR400@NDR400", 22, "NDR400", "second '@'"),
    ("8xH100+4xH100", 8, "4xH100", "how many nodes"),
    ("8xH100_2nodes+4xA100_1node", 15, "4xA100_1node", "one type"),
    ("8xH100_2nodes+4xH100_1node_1rack", 15, None, "same levels"),
    ("8xH100_2nodes+", 15, None, "an x"),
    ("8xH100_2nodes/NDR400", 8, "2nodes/NDR400", "a count"),
]


@pytest.mark.parametrize(("text", "position", "part", "why"), WRONG, ids=[repr(row[0])[:40] for row in WRONG])
def test_one_error_shows_the_grammar_and_the_offending_part(text, position, part, why):
    with pytest.raises(InputError) as caught:
        parse_topology(text)
    said = str(caught.value)
    assert GRAMMAR in said
    assert "\n" not in said
    assert len(said) < 1200
    hint = caught.value.hint or ""
    assert f"at character {position}," in hint
    assert why in hint
    if part is not None:
        assert repr(part) in hint
        assert text[position - 1 :].startswith(part)


@pytest.mark.parametrize("given", [None, 8, b"8xH100", ["8xH100"], 8.0, True])
def test_what_is_no_text_is_refused(given):
    for parse in (parse_topology, Topology.parse):
        with pytest.raises(InputError, match="COUNTxDEVICE"):
            parse(given)


@st.composite
def short_forms(draw: st.DrawFn) -> str:
    device = draw(st.sampled_from(list(DEVICES)))
    outer = draw(st.lists(st.sampled_from([word for word in WORDS if word not in ("node", "rack")]), unique=True, max_size=2))
    words = draw(st.sampled_from([[], ["node"], ["node", *outer], ["node", "rack", *outer]]))
    parts = []
    for _ in range(draw(st.integers(1, 3)) if words else 1):
        sizes = [draw(st.integers(1, 5)) for _ in words]
        parts.append("_".join([f"{draw(st.integers(1, 9))}x{device}", *(f"{n}{w}s" for n, w in zip(sizes, words, strict=True))]))
    outside = [name for name, network in NETWORKS.items() if not network.in_node] + ["40GbE", "800GbE"]
    networks = draw(st.lists(st.sampled_from(outside), max_size=len(words)))
    inside = draw(st.sampled_from([[], ["NVLink3"], ["2xPCIe5"], ["loopback"]]))
    written = []
    for name in [*inside, *networks]:
        links = draw(st.sampled_from(["", "1x", "4x", "16x"])) if name not in ("2xPCIe5",) else ""
        times = draw(st.one_of(st.just(""), st.integers(1, 1000).map(lambda k: f":{k}"), st.floats(1, 1000).map(_ratio)))
        written.append(f"{links}{name}{times}")
    return "+".join(parts) + (f"@{'/'.join(written)}" if written else "")


def _ratio(value: float) -> str:
    return f":{value:.12f}"


@given(short_forms())
@settings(max_examples=60, deadline=None)
def test_what_is_written_is_read_back_the_same(text):
    topology = parse_topology(text)
    written = format_topology(topology)
    assert parse_topology(written) == topology
    assert str(topology) == written
    assert format_topology(parse_topology(written)) == written


@given(short_forms())
@settings(max_examples=30, deadline=None)
def test_world_groups_and_counts_agree(text):
    topology = parse_topology(text)
    parts = [[int(n) for n in re.findall(r"(?:^|_)(\d+)", part)] for part in text.split("@")[0].split("+")]
    assert topology.world == sum(math.prod(part) for part in parts)
    for index, level in enumerate(topology.levels):
        groups = topology.groups(index)
        assert [rank for group in groups for rank in group] == list(range(topology.world))
        counts = topology.member_counts(index)
        assert len(groups) == len(counts)
        assert max(counts) == level.size
        inside = set(topology.groups(index - 1)) if index else {(rank,) for rank in range(topology.world)}
        assert sum(counts) == len(inside)
        assert max(len(group) for group in groups) <= topology.devices_in(index)
    assert str(topology.world) in topology.describe()


_PIECES = st.sampled_from(
    [*"0189xX_@/:+. -", "8xH100", "_2nodes", "_3racks", "_2sites", "NDR400", "@", "GbE", "²", "\x00", "\ud800", "node"]
)


@given(st.one_of(st.text(max_size=30), st.lists(_PIECES, max_size=10).map("".join)))
@settings(max_examples=120, deadline=None)
def test_any_text_is_read_or_refused(text):
    for parse in (parse_topology, Topology.parse):
        assert_read_or_refused(parse, text)


@given(short_forms(), st.data())
@settings(max_examples=40, deadline=None)
def test_a_damaged_text_is_read_or_refused(text, data):
    at = data.draw(st.integers(0, len(text)))
    for damaged in (text[:at], text[at:], text[:at] + data.draw(st.characters()) + text[at:]):
        assert_read_or_refused(parse_topology, damaged)


def assert_read_or_refused(parse: Callable[[str], Topology], text: str) -> None:
    try:
        topology = parse(text)
    except InputError as error:
        said = str(error)
    else:
        said = topology.describe() if topology.world < 10_000 else str(topology.world)
    assert said


def test_what_has_no_short_form_says_so():
    plain = Topology.parse("8xH100_2nodes_2racks")
    faster = replace(plain, levels=(plain.levels[0], replace(plain.levels[1], link_bandwidth=46e9), plain.levels[2]))
    assert str(faster) == "8xH100_2nodes_2racks@custom/NDR400"
    uneven = Topology(plain.device, (replace(plain.levels[0], counts=(8, 4, 8, 8)), plain.levels[1], plain.levels[2]))
    assert str(uneven) == "28xH100_ragged"
    named = replace(plain, hosts=("a", "b", "c", "d"))
    assert str(named) == str(plain)
    for topology in (faster, uneven, named, replace(plain, device=replace(plain.device, watts=1.0))):
        assert topology.describe()
        with pytest.raises(InputError, match="write it as a file"):
            format_topology(topology)


@pytest.mark.parametrize(
    "changed",
    [
        *({"size": wrong} for wrong in (0, -1, 1.5, True)),
        *({"link_bandwidth": wrong} for wrong in (0.0, -1.0, math.nan, math.inf, "1")),
        *({"counts": wrong} for wrong in ((2, 0), (), (1, 1))),
        {"links": 0},
        {"latency_s": -1e-6},
        {"oversubscription": 0.5},
        {"joules_per_byte": -1.0},
    ],
    ids=str,
)
def test_a_level_refuses_impossible_numbers(changed):
    with pytest.raises(InputError, match=r"^L1\."):
        Level(**({"name": "L1", "size": 2, "latency_s": 1e-6, "link_bandwidth": 1e9} | changed))


def test_a_topology_refuses_counts_and_hosts_that_do_not_fit():
    t = Topology.parse("8xH100_2nodes")
    with pytest.raises(InputError, match=r"L1\.counts"):
        replace(t, levels=(replace(t.levels[0], counts=(8, 8, 8)), t.levels[1]))
    with pytest.raises(InputError, match="hosts"):
        replace(t, hosts=("a",))
    with pytest.raises(InputError, match="hosts"):
        replace(t, hosts=("a", "a"))
    with pytest.raises(InputError, match="level"):
        replace(t, levels=())
