"""A topology as a table: what each key does, that every table is read back to the last bit, and what is refused."""

from __future__ import annotations

import json
import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laneway.cluster.catalogue import DEVICES, NETWORKS, device
from laneway.cluster.hostlist import expand_hosts
from laneway.cluster.topology import Device, Level, Topology
from laneway.cluster.topology_files import topology_from_dict, topology_to_dict, topology_to_toml
from laneway.core import InputError

FULL = """
device = "H100"
hosts = ["node[7-8,66,70]"]

[[levels]]
size = 8

[[levels]]
size = 2
network = "NDR400"
bandwidth_GB_per_s = 46.0
latency_us = 9.5
links = 4

[[levels]]
size = 2
member = "rack"
network = "400GbE"
oversubscription = 4
duplex = false
trusted = false
energy_nJ_per_byte = 3
"""


def test_every_key_is_used(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(FULL, "utf-8")
    t = Topology.parse(path)
    inner, middle, outer = t.levels
    assert (inner.network, inner.member, inner.name) == ("NVLink4", "device", "L1")
    assert (middle.link_bandwidth, middle.latency_s, middle.links, middle.member) == (46e9, 9.5e-6, 4, "node")
    assert (outer.oversubscription, outer.duplex, outer.trusted, outer.joules_per_byte) == (4, False, False, 3e-9)
    assert (outer.link_bandwidth, outer.links) == (NETWORKS["400GbE"].bandwidth, 8)
    assert t.hosts == ("node7", "node8", "node66", "node70")
    assert Topology.parse(str(path)) == t
    as_json = tmp_path / "cluster.json"
    as_json.write_text(json.dumps(tomllib.loads(FULL)), "utf-8")
    assert Topology.parse(as_json) == t


def test_the_short_form_and_the_table_agree():
    short = Topology.parse("8xA100_3nodes_2racks@NDR400/100GbE:2")
    table = {
        "device": "a100",
        "levels": [
            {"size": 8},
            {"size": 3, "network": "NDR400"},
            {"size": 2, "member": "rack", "network": "100GbE", "oversubscription": 2},
        ],
    }
    assert Topology.parse(table) == short
    assert Topology.parse({"topology": "8xA100_3nodes_2racks@NDR400/100GbE:2"}) == short


def test_racks_give_hosts_and_sizes():
    table = {
        "device": "H100",
        "levels": [{"size": 8}, {}, {"member": "rack"}],
        "racks": {"b": "node[7-9]", "a": ["node66", "node70"]},
    }
    t = Topology.parse(table)
    assert (t.levels[1].counts, t.levels[2].size, t.world) == ((3, 2), 2, 40)
    assert t.hosts == ("node7", "node8", "node9", "node66", "node70")
    assert Topology.parse(topology_to_dict(t)) == t
    even = Topology.parse({"topology": "8xH100_2nodes_2racks", "racks": {"a": "n[1-2]", "b": "n[3-4]"}})
    assert even.hosts == ("n1", "n2", "n3", "n4")
    with pytest.raises(InputError, match="racks"):
        Topology.parse({"topology": "8xH100_2nodes_2racks", "racks": {"a": "n[1-3]", "b": "n4"}})
    with pytest.raises(InputError, match="racks"):
        Topology.parse({"topology": "8xH100", "racks": {"a": "n1"}})


def test_counts_make_a_level_ragged():
    t = Topology.parse({"device": "H100", "levels": [{"counts": [8, 8, 4]}, {"size": 3}]})
    assert (t.world, t.levels[0].size) == (20, 8)


def test_a_device_of_ones_own():
    own = {"name": "X9", "teraflops": {"bf16": 123.4}, "memory_GB": 24, "memory_bandwidth_GB_per_s": 960, "watts": 300}
    levels = [{"size": 2, "network": "PCIe4"}, {"size": 3, "bandwidth_GB_per_s": 1.5, "latency_us": 20}]
    t = Topology.parse({"device": own, "levels": levels})
    assert t.device == Device("X9", {"bf16": 123.4e12}, 24e9, 960e9, 300, "")
    assert (t.levels[1].network, t.levels[1].links) == ("custom", 1)
    assert Topology.parse(topology_to_dict(t)) == t


positive = st.floats(min_value=1e-30, max_value=1e30)


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    own = st.builds(
        Device,
        name=st.text(min_size=1, max_size=5),
        flops=st.dictionaries(st.sampled_from(["fp32", "tf32", "bf16", "fp8"]), positive, min_size=1),
        memory_bytes=positive,
        memory_bandwidth=positive,
        watts=positive,
        source=st.text(max_size=5),
    )
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    levels: list[Level] = []
    for index in reversed(range(len(sizes))):
        outer = levels[0] if levels else None
        groups = 1 if outer is None else sum(outer.counts) if outer.counts else outer.size * _groups(levels)
        counts = draw(st.one_of(st.none(), st.tuples(*[st.integers(1, 4)] * groups)))
        level = Level(
            name=f"L{index + 1}",
            size=max(counts) if counts else sizes[index],
            latency_s=draw(st.one_of(st.just(0.0), positive)),
            link_bandwidth=draw(positive),
            links=draw(st.integers(1, 100)),
            oversubscription=draw(st.floats(1, 100)),
            duplex=draw(st.booleans()),
            trusted=draw(st.booleans()),
            joules_per_byte=draw(st.one_of(st.just(0.0), positive)),
            network=draw(st.sampled_from(["custom", "NDR400", "WAN"])),
            source=draw(st.text(max_size=5)),
            counts=counts,
            member=draw(st.sampled_from(["", "node", "island"])),
        )
        levels.insert(0, level)
    named = Topology(draw(st.one_of(own, st.sampled_from([e.device for e in DEVICES.values()]))), tuple(levels))
    hosts = tuple(f"n{i}" for i in range(len(named.member_counts(0)))) if draw(st.booleans()) else ()
    return Topology(named.device, named.levels, hosts)


def _groups(levels: list[Level]) -> int:
    return Topology(device("CPU"), tuple(levels)).members(0) // levels[0].size


@given(topologies())
@settings(max_examples=40, deadline=None)
def test_what_is_written_is_read_back_to_the_last_bit(topology):
    table = topology_to_dict(topology)
    assert topology_from_dict(table) == topology
    assert topology_from_dict(json.loads(json.dumps(table))) == topology
    assert topology_from_dict(tomllib.loads(topology_to_toml(topology))) == topology


LEVELS = [{"size": 8}, {"size": 2}]
WRONG = [
    ({}, "device", "levels"),
    ({"device": "H100"}, "levels", "levels"),
    ({"device": "H100", "levels": []}, "levels", "innermost"),
    ({"device": "H100", "levels": "8"}, "levels", "innermost"),
    ({"device": "H100", "levels": [8]}, "levels[0]", "size"),
    ({"device": "H10", "levels": LEVELS}, "device", "H100"),
    ({"device": 8, "levels": LEVELS}, "device", "a table"),
    ({"device": "H100", "levels": LEVELS, "host": ["a"]}, "topology.host", "hosts"),
    ({"topology": "8xH100", "levels": LEVELS}, "topology", "short form"),
    ({"topology": "8xH100_0nodes"}, "topology", "COUNTxDEVICE"),
    ({"topology": "8xH100_2nodes", "hosts": ["a"]}, "hosts", "2 different"),
    ({"topology": "8xH100_2nodes", "hosts": ["a", "a"]}, "hosts", "2 different"),
    ({"topology": "8xH100_2nodes", "hosts": 3}, "hosts", "names"),
    ({"topology": "8xH100_2nodes", "hosts": ["a", 3]}, "hosts", "names"),
    ({"topology": "8xH100_2nodes", "hosts": "n[3-1]"}, "hosts", "range"),
    ({"topology": "8xH100_2nodes", "hosts": ["a", "b"], "racks": {"x": "a"}}, "racks", "not both"),
    ({"topology": "8xH100_2nodes", "racks": []}, "racks", "a table"),
]
LEVEL_WRONG = [
    ({}, "levels[1].size", "≥ 1"),
    ({"size": 0}, "levels[1].size", "≥ 1"),
    ({"size": -2}, "levels[1].size", "≥ 1"),
    ({"size": "2"}, "levels[1].size", "≥ 1"),
    ({"size": 2.0}, "levels[1].size", "≥ 1"),
    ({"size": 2, "counts": 3}, "levels[1].counts", "a list"),
    ({"counts": [2, 2]}, "L2.counts", "one count"),
    ({"size": 3, "counts": [2]}, "L2.counts", "largest"),
    ({"size": 2, "network": "NDR40"}, "levels[1].network", "NDR400"),
    ({"size": 2, "network": "custom"}, "levels[1].bandwidth_GB_per_s", "a number"),
    ({"size": 2, "bandwidth_GB_per_s": 1}, "levels[1].latency_us", "a number"),
    ({"size": 2, "network": "NDR400", "bandwidth_GB_per_s": 0}, "levels[1].bandwidth_GB_per_s", "> 0"),
    ({"size": 2, "network": "NDR400", "bandwidth_GB_per_s": -1}, "levels[1].bandwidth_GB_per_s", "> 0"),
    ({"size": 2, "network": "NDR400", "bandwidth_GB_per_s": "50"}, "levels[1].bandwidth_GB_per_s", "> 0"),
    ({"size": 2, "network": "NDR400", "bandwidth_GB_per_s": float("nan")}, "levels[1].bandwidth_GB_per_s", "> 0"),
    ({"size": 2, "network": "NDR400", "bandwidth_GB_per_s": 10**400}, "levels[1].bandwidth_GB_per_s", "> 0"),
    ({"size": 2, "network": "NDR400", "bandwidth_GB_per_s": 1e305}, "levels[1].bandwidth_GB_per_s", "> 0"),
    ({"size": 2, "bandwidth_GB_per_s": 1, "bandwidth_B_per_s": 1e9}, "levels[1].bandwidth_B_per_s", "not both"),
    ({"size": 2, "latency_us": -1}, "levels[1].latency_us", "≥ 0"),
    ({"size": 2, "links": 0}, "levels[1].links", "≥ 1"),
    ({"size": 2, "links": 1.5}, "levels[1].links", "≥ 1"),
    ({"size": 2, "oversubscription": 0.5}, "levels[1].oversubscription", "≥ 1"),
    ({"size": 2, "duplex": 1}, "levels[1].duplex", "true or false"),
    ({"size": 2, "trusted": "no"}, "levels[1].trusted", "true or false"),
    ({"size": 2, "energy_nJ_per_byte": -1}, "levels[1].energy_nJ_per_byte", "≥ 0"),
    ({"size": 2, "band_width": 1}, "levels[1].band_width", "bandwidth_GB_per_s"),
    ({"size": 2, "bandwidth": 1}, "levels[1].bandwidth", "bandwidth_GB_per_s"),
    ({"size": 2, "member": 3}, "levels[1].member", "a text"),
]
DEVICE_WRONG = [
    ({"name": ""}, "device.name", "a name"),
    ({"teraflops": {}}, "device.teraflops", "bf16"),
    ({"teraflops": {"int4": 3}}, "device.teraflops.int4", "bf16"),
    ({"teraflops": {"bf16": 0}}, "device.teraflops.bf16", "> 0"),
    ({"teraflops": 3}, "device.teraflops", "a table"),
    ({"flops": {"bf16": 3}}, "device.teraflops", "teraflops or flops"),
    ({"memory_GB": 0}, "device.memory_GB", "> 0"),
    ({"watts": -1}, "device.watts", "≥ 0"),
    ({"memory": 3}, "device.memory", "memory_GB"),
]
OWN = {"name": "X9", "teraflops": {"bf16": 1}, "memory_GB": 24, "memory_bandwidth_GB_per_s": 960, "watts": 300}
ALL_WRONG = [
    *WRONG,
    *(({"device": "H100", "levels": [{"size": 8}, level]}, *rest) for level, *rest in LEVEL_WRONG),
    *(({"device": OWN | own, "levels": [{"size": 2, "network": "PCIe4"}]}, *rest) for own, *rest in DEVICE_WRONG),
    ({"device": OWN, "levels": LEVELS}, "levels[0].bandwidth_GB_per_s", "a network"),
]


JSON = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4), st.sampled_from(["H100", "NDR400", "a[1-2]"])
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=6,
)


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_any_table_is_read_or_refused(data):
    """A good table of which one value or key is another."""
    table = tomllib.loads(FULL)
    holder = data.draw(st.sampled_from([table, *table["levels"]]))
    keys = [*holder, "counts", "racks", "topology", "latency_s", "source"]
    holder[data.draw(st.sampled_from(keys))] = data.draw(JSON)
    assert_read_or_refused(table)
    assert_read_or_refused(data.draw(JSON))


def assert_read_or_refused(table: object) -> None:
    try:
        said = Topology.parse(table).describe()
    except InputError as error:
        said = str(error)
    assert said


def test_a_cluster_larger_than_any_is_refused():
    for levels in ([{"size": 10**30}], [{"size": 10**4}, {"size": 10**4}]):
        with pytest.raises(InputError, match="at most"):
            topology_from_dict({"device": "H100", "levels": levels})


@pytest.mark.parametrize(("table", "field", "accepted"), ALL_WRONG, ids=[f"{i}-{row[1]}" for i, row in enumerate(ALL_WRONG)])
def test_what_is_wrong_is_named(table, field, accepted):
    with pytest.raises(InputError) as caught:
        topology_from_dict(table)
    assert caught.value.field == field
    assert accepted in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.toml", "device = "),
        ("a.toml", "= 3"),
        ("a.json", "[1]"),
        ("a.json", "{"),
        ("a.json", "[" * 100_000),
        ("a.toml", "\xff"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path, name, text):
    path = tmp_path / name
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError, match="topology"):
        Topology.parse(path)


@pytest.mark.parametrize("path", ["missing.toml", "\x00.json", "x" * 5000 + ".toml", ".toml"])
def test_a_file_that_is_not_there_is_refused(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="readable"):
        Topology.parse(path)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node7", ["node7"]),
        ("node[001-003,7]", ["node001", "node002", "node003", "node7"]),
        ("node[08-11]", ["node08", "node09", "node10", "node11"]),
        ("node[8-11]", ["node8", "node9", "node10", "node11"]),
        ("gpu-a[1-2]b[3-4].local,login1", ["gpu-a1b3.local", "gpu-a1b4.local", "gpu-a2b3.local", "gpu-a2b4.local", "login1"]),
        ("a,b,a[1]", ["a", "b", "a1"]),
        ("wn[005-006,010]", ["wn005", "wn006", "wn010"]),
    ],
)
def test_lists_of_hosts(text, names):
    assert list(expand_hosts(text)) == names


NO_HOSTS = ["", ",", "a,", ",a", "a,,b", "a[", "a]", "a[]", "a[1-]", "a[2-1]", "a[1-2", "a[[1]]", "a b", "a[x]", "a[1-²]"]


@pytest.mark.parametrize("text", [*NO_HOSTS, "a[1-9999999]", "a[1-999][1-999]"])
def test_what_is_no_list_of_hosts_is_refused(text):
    with pytest.raises(InputError):
        expand_hosts(text)


@given(st.text(st.sampled_from("a1[]-,0 ²"), max_size=12))
@settings(max_examples=100, deadline=None)
def test_any_text_is_a_list_of_hosts_or_refused(text):
    try:
        names = expand_hosts(text)
    except InputError:
        return
    assert names
    assert all(names)
