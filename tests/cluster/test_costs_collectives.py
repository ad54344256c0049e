"""Collectives against a discrete simulation of rings, published figures, and what no scheme can beat."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laneway.cluster.costs import ALGORITHMS, Calibration, Group, choose_collective, collective_bytes, collective_time, place
from laneway.cluster.costs.constants import BASE_LATENCY
from laneway.cluster.costs.schemes import torus_sizes
from laneway.cluster.topology import Device, Level, Topology
from laneway.core import InputError

H100 = Device("H100", {"bf16": 989e12}, 80e9, 3.35e12, 700, "test")
A100 = Device("A100", {"bf16": 312e12}, 80e9, 2.04e12, 400, "test")


def machine(nodes: int = 16, racks: int = 1, outer: float = 45e9 * 128, device: Device = H100) -> Topology:
    """8 devices a node, one NDR adapter each, racks on any bandwidth."""
    levels = [Level("L1", 8, 3.4e-6, 365e9), Level("L2", nodes, 14e-6, 48.5e9, links=8)]
    if racks > 1:
        levels.append(Level("L3", racks, 20e-6, outer))
    return Topology(device, tuple(levels))


def single(size: int, latency: float, bandwidth: float) -> Topology:
    return Topology(A100, (Level("L1", size, latency, bandwidth),))


def simulated_ring(edges: list[tuple[Fraction, Fraction]], steps: int) -> Fraction:
    """Seconds until every rank has received `steps` chunks. Edge i leads to rank i: latency, and seconds it is busy with a chunk.

    A rank passes chunk t on once it has chunk t - 1 and the edge is free.
    """
    ranks = len(edges)
    arrived = [Fraction(0)] * ranks
    free = [Fraction(0)] * ranks
    for _ in range(steps):
        starts = [max(arrived[rank - 1], free[rank]) for rank in range(ranks)]
        free = [start + edges[rank][1] for rank, start in enumerate(starts)]
        arrived = [free[rank] + edges[rank][0] for rank in range(ranks)]
    return max(arrived)


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
@pytest.mark.parametrize(("op", "legs"), [("all_reduce", 2), ("reduce_scatter", 1), ("all_gather", 1)])
def test_ring_equals_the_simulation_bit_for_bit(ranks: int, op: str, legs: int) -> None:
    """Powers of two, so that floats are exact."""
    latency, bandwidth, nbytes = 2.0**-18, 2.0**36, 2.0**24
    edge = (Fraction(latency), Fraction(nbytes) / ranks / Fraction(bandwidth))
    wanted = simulated_ring([edge] * ranks, legs * (ranks - 1))
    found = collective_time(op, nbytes, single(ranks, latency, bandwidth), algorithm="ring").value - BASE_LATENCY.value
    assert found == pytest.approx(float(wanted), rel=1e-12)
    cost = (float(wanted) + BASE_LATENCY.value) - BASE_LATENCY.value
    assert found == cost


@given(ranks=st.integers(2, 12), latency=st.floats(1e-7, 1e-3), bandwidth=st.floats(1e8, 1e12), nbytes=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_ring_equals_the_simulation(ranks: int, latency: float, bandwidth: float, nbytes: int) -> None:
    edge = (Fraction(latency), Fraction(nbytes) / ranks / Fraction(bandwidth))
    wanted = simulated_ring([edge] * ranks, 2 * (ranks - 1)) + Fraction(BASE_LATENCY.value)
    found = collective_time("all_reduce", nbytes, single(ranks, latency, bandwidth), algorithm="ring").value
    assert found == pytest.approx(float(wanted), rel=1e-9)


@given(inside=st.sampled_from([3, 4, 8]), nodes=st.integers(2, 5), nbytes=st.floats(0, 1e9), slow=st.floats(1, 50))
@settings(max_examples=40, deadline=None)
def test_ring_over_two_levels_brackets_the_simulation(inside: int, nodes: int, nbytes: float, slow: float) -> None:
    """The formula adds the longest path's steps and the slowest edge's bytes: never below the simulation, never twice it."""
    fast, rate = 1e-6, 1e11
    topology = Topology(A100, (Level("L1", inside, fast, rate), Level("L2", nodes, 5e-6, rate / slow)))
    ranks = inside * nodes
    # One ring of the rails: a node's link carries as many of them as it has devices.
    outer = Fraction(nbytes) / ranks / Fraction(rate / slow)
    inner = Fraction(nbytes) / ranks / Fraction(rate) / inside
    edges = [(Fraction(5e-6), outer) if rank % inside == 0 else (Fraction(fast), inner) for rank in range(ranks)]
    wanted = float(simulated_ring(edges, 2 * (ranks - 1)))
    found = collective_time("all_reduce", nbytes, topology, algorithm="ring").value - BASE_LATENCY.value
    assert wanted * (1 - 1e-9) <= found <= 2 * wanted
    if nbytes == 0:
        assert found == pytest.approx(wanted)


def test_hierarchy_cuts_no_bytes_against_an_ordered_ring() -> None:
    """Both send twice the vector out of a node; a ring in the worst order sends G times as much."""
    topology, nbytes = machine(64), 1e9
    out = {
        scheme: 8 * collective_bytes("all_reduce", nbytes, topology, algorithm=scheme)["L2"]
        for scheme in ("ring", "hierarchy", "two_level", "torus", "ring_worst")
    }
    assert out["ring"] == pytest.approx(2 * 511 / 512 * nbytes)
    assert out["hierarchy"] == pytest.approx(2 * 63 / 64 * nbytes)
    assert out["two_level"] == out["hierarchy"]
    assert out["torus"] == pytest.approx(out["hierarchy"])
    assert out["ring_worst"] == pytest.approx(8 * out["ring"])


def test_torus_saves_steps_and_no_bytes() -> None:
    topology = machine(16)
    flat = collective_time("all_reduce", 0, topology, algorithm="hierarchy").value
    folded = collective_time("all_reduce", 0, topology, algorithm="torus", dims=(4, 2, 2)).value
    assert flat - folded == pytest.approx((30 - 10) * 14e-6)
    assert torus_sizes(16) == (4, 2, 2)
    assert torus_sizes(7) == (7,)


def test_hierarchy_saves_latency() -> None:
    """2(N-1) steps against 2(G-1) + 2(M-1) + 2(R-1)."""
    topology = machine(16, 32)
    hierarchy = collective_time("all_reduce", 0, topology, algorithm="hierarchy").value - BASE_LATENCY.value
    assert hierarchy == pytest.approx(14 * 3.4e-6 + 30 * 14e-6 + 62 * 20e-6)
    assert collective_time("all_reduce", 0, topology, algorithm="ring").value > 10 * hierarchy


@pytest.mark.parametrize(
    ("outer", "latency", "worst", "ring", "hierarchy"),
    [(45e9 * 32, 20e-6, 207, 40, 4.3), (11.25e9 * 16, 25e-6, 547, 42, 6.9), (2.8e9 * 16, 30e-6, 1621, 50, 15)],
)
def test_gradient_sync_of_resnet152_as_worked_out_by_hand(
    outer: float, latency: float, worst: float, ring: float, hierarchy: float
) -> None:
    """Milliseconds for 60.19 M fp32 values on 8 × 16 × 32 devices, over 4:1 RoCE, 100 and 25 Gb/s a node."""
    levels = (*machine(16).levels, Level("L3", 32, latency, outer))
    topology = Topology(H100, levels)
    found = {
        scheme: 1e3 * collective_time("all_reduce", 4 * 60.19e6, topology, algorithm=scheme).value
        for scheme in ("ring_worst", "ring", "hierarchy")
    }
    assert found["ring_worst"] == pytest.approx(worst, rel=0.01)
    assert found["ring"] == pytest.approx(ring, rel=0.02)
    assert found["hierarchy"] == pytest.approx(hierarchy, rel=0.02)


@pytest.mark.parametrize(("nodes", "latency"), [(4, 81e-6), (8, 109e-6), (16, 137e-6), (32, 165e-6)])
def test_nvls_tree_as_nccl_says(nodes: int, latency: float) -> None:
    """NCCL 2.27.5's tuner: 160 GB/s at 4 to 32 nodes of 8 H100."""
    found = collective_time("all_reduce", 1e9, machine(nodes), algorithm="nvls_tree").value
    assert found == pytest.approx(latency + BASE_LATENCY.value + 1e9 / 160e9, rel=0.02)


@given(
    size=st.integers(1, 512),
    stride=st.integers(1, 512),
    nbytes=st.floats(1e6, 1e10),
    op=st.sampled_from(["all_reduce", "reduce_scatter", "all_gather"]),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_a_group_over_nodes_is_never_priced_inside_one(
    size: int, stride: int, nbytes: float, op: str, data: st.DataObject
) -> None:
    """Least time: the bytes that must leave the node of some rank, over all of its adapters' bandwidth."""
    topology = machine(64)
    if size * stride > topology.world:
        return
    algorithm = data.draw(st.sampled_from([name for name in ALGORITHMS[op] if name not in ("torus", "nvls_tree")]))
    ranks = range(0, size * stride, stride)
    nodes = {rank // 8 for rank in ranks}
    found = collective_time(op, nbytes, topology, algorithm=algorithm, group=Group(size, stride)).value
    if len(nodes) > 1:
        assert found >= nbytes / len(nodes) / (8 * 48.5e9)
        outside = collective_bytes(op, nbytes, topology, algorithm=algorithm, group=Group(size, stride))
        assert outside["L2"] > 0


def test_outer_dimension_of_a_mesh_is_no_faster_than_the_adapter() -> None:
    """Two ranks on two nodes, all eight pairs at once: the adapter's bandwidth, not NVLink's."""
    seconds = collective_time("all_reduce", 1e9, machine(2), algorithm="ring", group=Group(2, 8)).value
    assert seconds >= 1e9 / 48.5e9
    assert collective_time("all_reduce", 1e9, machine(2), algorithm="ring", group=Group(2, 1)).value < 1e9 / 300e9


@given(size=st.integers(1, 32), stride=st.integers(1, 16), base=st.integers(0, 15))
@settings(max_examples=50, deadline=None)
def test_listed_ranks_and_strides_agree(size: int, stride: int, base: int) -> None:
    """A regular group touches at least as many units as each of its copies does."""
    topology = machine(8, 8)
    if size * stride > topology.world:
        return
    regular = place(Group(size, stride), topology)
    start = base % stride
    listed = place([start + stride * index for index in range(size)], topology)
    assert all(ours >= theirs for ours, theirs in zip(regular.units, listed.units, strict=True))
    if 512 % (size * stride) == 0 and 8 % min(8, stride) == 0 and (stride & (stride - 1)) == 0:
        assert regular.units == listed.units


def test_flattened_dimensions_that_are_not_neighbours() -> None:
    """Devices 0 and 1 of every other node: a list of ranks."""
    ranks = [node * 8 + device for node in range(0, 16, 2) for device in (0, 1)]
    found = place(ranks, machine(16))
    assert (found.units, found.inside(1), found.fan(1)) == ((8, 1), 2, 8)


def test_ragged_nodes() -> None:
    topology = Topology(A100, (Level("L1", 4, 1e-6, 1e11, counts=(4, 4, 3)), Level("L2", 3, 1e-5, 1e10)))
    assert topology.world == 11
    assert place(None, topology).units == (3, 1)
    assert place([0, 1, 2, 3], topology).units == (1, 1)
    assert place([3, 4], topology).units == (2, 1)
    assert place([8, 9, 10], topology).units == (1, 1)


def test_pipelining_chunks_overlaps_levels() -> None:
    topology = machine(16, 4, outer=11.25e9 * 16)
    whole = collective_time("all_reduce", 1e9, topology, algorithm="hierarchy").value
    cut = collective_time("all_reduce", 1e9, topology, algorithm="hierarchy", chunks=16).value
    assert cut < whole
    tiny = collective_time("all_reduce", 1e3, topology, algorithm="hierarchy", chunks=16).value
    assert tiny > collective_time("all_reduce", 1e3, topology, algorithm="hierarchy").value


def test_all_to_all_by_level_saves_messages() -> None:
    topology = machine(64)
    small = {name: collective_time("all_to_all", 1e4, topology, algorithm=name).value for name in ("flat", "hierarchy")}
    large = {name: collective_time("all_to_all", 1e9, topology, algorithm=name).value for name in ("flat", "hierarchy")}
    assert small["hierarchy"] < small["flat"]
    assert large["hierarchy"] > large["flat"]


@given(
    exponent=st.floats(3, 10),
    nodes=st.sampled_from([2, 4, 16]),
    racks=st.sampled_from([1, 8]),
    op=st.sampled_from(["all_reduce", "reduce_scatter", "all_gather", "all_to_all"]),
)
@settings(max_examples=60, deadline=None)
def test_the_choice_is_never_slower_than_native(exponent: float, nodes: int, racks: int, op: str) -> None:
    chosen = choose_collective(op, 10**exponent, machine(nodes, racks))
    assert chosen.seconds.value <= chosen.native_seconds.value
    assert chosen.native == (chosen.seconds == chosen.native_seconds)
    if not chosen.native:
        assert chosen.seconds.value < 0.95 * chosen.native_seconds.value


def test_native_is_kept_where_it_wins_and_only_there() -> None:
    big = machine(16, 32)
    assert choose_collective("all_reduce", 1e8, big).native
    assert not choose_collective("reduce_scatter", 1e8, big).native
    cpu = Topology(Device("CPU", {"fp32": 1e12}, 64e9, 1e11, 200, "test"), big.levels)
    on_cpu = choose_collective("all_reduce", 1e6, cpu)
    assert not on_cpu.native
    assert "tree" not in on_cpu.compared


def test_interval_and_slower_network() -> None:
    fast = collective_time("all_reduce", 1e9, machine(4), algorithm="ring")
    assert fast.low < fast.value < fast.high
    loaded = collective_time("all_reduce", 1e9, machine(4), algorithm="ring", calibration=Calibration(network_efficiency=0.5))
    assert loaded.value > 1.9 * fast.value


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"op": "all_redude"}, "all_reduce"),
        ({"algorithm": "rings"}, "did you mean 'ring'"),
        ({"nbytes": -1}, "bytes ≥ 0"),
        ({"nbytes": float("nan")}, "bytes ≥ 0"),
        ({"group": Group(1000)}, "ranks below"),
        ({"group": [0, 0]}, "different ranks"),
        ({"group": 0}, "integer ≥ 1"),
        ({"chunks": 0}, "integer ≥ 1"),
        ({"algorithm": "torus", "dims": (3, 2)}, "multiply to the 16"),
        ({"algorithm": "nvls_tree", "topology": machine(16, device=A100)}, "multicast"),
        ({"algorithm": "nvls_tree", "group": Group(16, 8)}, "more than one device"),
    ],
)
def test_bad_input(change: dict[str, object], told: str) -> None:
    arguments = {"op": "all_reduce", "nbytes": 1e6, "topology": machine(16), "algorithm": "ring"} | change
    with pytest.raises(InputError, match=told):
        collective_time(**arguments)  # ty: ignore


def test_level_without_bandwidth() -> None:
    """Refused where the level is made, or where it is priced."""
    with pytest.raises(InputError):
        collective_time("all_reduce", 1e6, single(8, 1e-6, 0.0), algorithm="ring")
