"""A whole step: parts add up, and every dial moves what it should."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laneway.cluster.architecture import Architecture
from laneway.cluster.costs import Calibration, estimate_step, flops_per_token
from laneway.cluster.costs.pipeline import bubble_seconds
from laneway.cluster.estimate import Estimate
from laneway.cluster.layout import Layout
from laneway.cluster.topology import Device, Level, Topology
from laneway.core import InputError

H100 = Device("H100", {"bf16": 989e12, "fp8": 1979e12, "tf32": 494e12}, 80e9, 3.35e12, 700, "test")
ARCH = Architecture(32, 4096, 32, 32, 4 * 4096, 50000)
LAYOUT = Layout(tp=4, pp=4, dp_shard=8, micro_batch=2, zero=1)


def machine(nodes: int = 64, rate: float = 48.5e9) -> Topology:
    return Topology(H100, (Level("L1", 8, 3.4e-6, 365e9), Level("L2", nodes, 14e-6, rate, links=8)))


def step(layout: Layout = LAYOUT, arch: Architecture = ARCH, **change: Any) -> Estimate:
    arguments: dict[str, Any] = {"global_batch": 512, "seq_len": 2048} | change
    topology = arguments.pop("topology", machine())
    return estimate_step(arch, layout, topology, **arguments)


layouts = st.builds(
    Layout,
    tp=st.sampled_from([1, 2, 8]),
    cp=st.sampled_from([1, 2]),
    dp_shard=st.sampled_from([1, 4]),
    dp_replicate=st.sampled_from([1, 2]),
    pp=st.sampled_from([1, 2, 4]),
    micro_batch=st.sampled_from([1, 4]),
    recompute=st.sampled_from(["none", "selective", "full"]),
    precision=st.sampled_from(["fp32", "bf16", "fp8"]),
    sequence_parallel=st.booleans(),
    chunks=st.sampled_from([1, 2]),
    zero=st.sampled_from([1, 2, 3]),
    grad_bytes=st.sampled_from([2, 4]),
    overlap_grads=st.booleans(),
)
architectures = st.sampled_from(
    [
        ARCH,
        replace(ARCH, streams=4),
        replace(ARCH, kv_heads=8, gated=True, tied=False),
        replace(ARCH, experts=8, experts_per_token=2),
    ]
)


@given(layout=layouts, arch=architectures, algorithm=st.sampled_from(["auto", "native", "ring_worst", "hierarchy"]))
@settings(max_examples=40, deadline=None)
def test_parts_add_up(layout: Layout, arch: Architecture, algorithm: str) -> None:
    found = step(layout, arch, algorithm=algorithm)
    assert sum(found.breakdown.values()) == pytest.approx(found.seconds.value)
    assert found.seconds.low <= found.seconds.value <= found.seconds.high
    assert all(seconds >= 0 and math.isfinite(seconds) for seconds in (*found.breakdown.values(), *found.hidden.values()))
    assert set(found.breakdown) == {
        "compute", "recompute", "tensor", "context", "expert", "pipeline", "bubble", "data", "optimizer"
    }  # fmt: skip
    assert 0 < found.mfu < 1
    assert found.memory.total > 0
    assert set(found.bytes_per_level) <= {"L1", "L2"}
    assert found.kwh_per_token == pytest.approx(layout.world * 700 * found.seconds.value / 3.6e6 / (512 * 2048))


@given(layout=layouts, slower=st.floats(1.5, 20))
@settings(max_examples=20, deadline=None)
def test_a_slower_network_never_helps(layout: Layout, slower: float) -> None:
    fast, slow = step(layout), step(layout, topology=machine(rate=48.5e9 / slower))
    assert slow.seconds.value >= fast.seconds.value * (1 - 1e-9)


@given(layout=layouts)
@settings(max_examples=20, deadline=None)
def test_a_forced_algorithm_is_never_faster_than_the_choice(layout: Layout) -> None:
    auto = step(layout).seconds.value
    assert step(layout, algorithm="native").seconds.value >= auto * (1 - 1e-9)
    assert step(layout, algorithm="ring_worst").seconds.value >= auto * (1 - 1e-9)


def test_mfu_is_flops_over_peak() -> None:
    found = step()
    done = flops_per_token(ARCH, 2048) * 512 * 2048
    assert found.mfu == pytest.approx(done / (128 * 989e12 * found.seconds.value))


@given(pp=st.integers(2, 16), micro_batches=st.integers(1, 64), chunks=st.integers(1, 4), seconds=st.floats(0.01, 10))
@settings(max_examples=20, deadline=None)
def test_bubble_of_equal_stages(pp: int, micro_batches: int, chunks: int, seconds: float) -> None:
    stages = [seconds] * pp
    share = bubble_seconds(stages, chunks) / (micro_batches * seconds)
    assert share == pytest.approx((pp - 1) / (chunks * micro_batches))  # Narayanan et al. 2021, section 2.2


@given(stages=st.lists(st.integers(1, 50), min_size=1, max_size=6), micro_batches=st.integers(1, 12))
@settings(max_examples=40, deadline=None)
def test_unequal_stages_against_a_simulated_pipeline(stages: list[int], micro_batches: int) -> None:
    """Forward passes alone, in order: exact."""
    done = [0] * len(stages)
    for _ in range(micro_batches):
        before = 0
        for index, seconds in enumerate(stages):
            done[index] = max(done[index], before) + seconds
            before = done[index]
    assert done[-1] == micro_batches * max(stages) + bubble_seconds(stages)


def test_dials() -> None:
    base = step()
    assert step(replace(LAYOUT, recompute="full")).seconds.value > base.seconds.value
    assert step(replace(LAYOUT, recompute="full")).breakdown["recompute"] > 0
    assert step(replace(LAYOUT, chunks=2)).breakdown["bubble"] < 0.6 * base.breakdown["bubble"]
    assert step(replace(LAYOUT, overlap_grads=False)).breakdown["data"] > base.breakdown["data"]
    assert step(replace(LAYOUT, grad_bytes=2)).bytes_per_level["L2"] < base.bytes_per_level["L2"]
    assert step(replace(LAYOUT, precision="fp8")).breakdown["compute"] < base.breakdown["compute"]
    assert step(arch=replace(ARCH, streams=4)).breakdown["pipeline"] > base.breakdown["pipeline"]
    assert step(arch=replace(ARCH, streams=4)).breakdown["compute"] > base.breakdown["compute"]
    unfused = Calibration(flash_attention=False)
    selective = replace(LAYOUT, recompute="selective")
    assert step(selective, calibration=unfused).breakdown["recompute"] > 0
    assert step(selective).breakdown["recompute"] == 0
    assert step(replace(LAYOUT, zero=3)).bytes_per_level["L2"] > base.bytes_per_level["L2"]


def test_context_and_expert_parallelism_are_priced() -> None:
    ring = step(replace(LAYOUT, pp=1, cp=4))
    assert ring.breakdown["context"] + ring.hidden["context"] > 0
    moe = replace(ARCH, experts=8, experts_per_token=2)
    assert step(replace(LAYOUT, ep=8), moe).breakdown["expert"] > 0
    assert step(LAYOUT, moe).breakdown["expert"] == 0


def test_tensor_parallelism_over_nodes_is_dear() -> None:
    inside, across = step(Layout(tp=8, dp_shard=16)), step(Layout(tp=16, dp_shard=8))
    assert across.breakdown["tensor"] > 2 * inside.breakdown["tensor"]


@given(crowding=st.floats(0.0, 3.0), tp=st.sampled_from([1, 2, 4, 8, 16]))
@settings(max_examples=20, deadline=None)
def test_tensor_groups_in_one_node_crowd_each_other(crowding: float, tp: int) -> None:
    """Each doubling of the groups in a node adds `crowding` to their messages; one that fills a node, or is alone, pays none."""
    layout = Layout(tp=tp, dp_shard=64 // tp)
    alone, beside = (step(layout, calibration=Calibration(crowding=c, tensor_overlap=False)) for c in (0.0, crowding))
    doublings = {1: 3, 2: 2, 4: 1, 8: 0, 16: 0}[tp]
    assert beside.breakdown["tensor"] == pytest.approx(alone.breakdown["tensor"] * (1 + doublings * crowding))
    single = Layout(tp=tp, micro_batch=2)
    quiet = step(single, calibration=Calibration(crowding=0.0))
    assert step(single, calibration=Calibration(crowding=crowding)).seconds == quiet.seconds


@given(tp=st.sampled_from([2, 4, 8, 16]), micro_batch=st.sampled_from([1, 2, 4]), slowdown=st.floats(0.0, 1.0))
@settings(max_examples=20, deadline=None)
def test_tensor_messages_hide_behind_gradients_of_weights(tp: int, micro_batch: int, slowdown: float) -> None:
    layout = Layout(tp=tp, dp_shard=64 // tp, micro_batch=micro_batch)
    late = step(layout, calibration=Calibration(tensor_overlap=False))
    beside = step(layout, calibration=Calibration(overlap_slowdown=slowdown))
    saved = late.breakdown["tensor"] - beside.breakdown["tensor"]
    assert saved == pytest.approx((1 - slowdown) * beside.hidden["tensor"], abs=1e-9)
    # At most the backward half of the messages, and at most what those products take: under a third of all compute.
    assert 0 < beside.hidden["tensor"] <= late.breakdown["tensor"] / 2 + 1e-9
    assert beside.hidden["tensor"] < late.breakdown["compute"] / 3
    assert late.hidden.get("tensor", 0.0) == 0.0


def test_pipelines_in_one_node_interfere() -> None:
    quiet = Calibration(interference=0.0)
    narrow = replace(LAYOUT, tp=2, dp_shard=16)
    assert step(narrow).seconds.value > step(narrow, calibration=quiet).seconds.value
    whole = replace(LAYOUT, tp=8, dp_shard=4)
    assert step(whole).seconds.value == step(whole, calibration=quiet).seconds.value
    shallow = replace(LAYOUT, tp=2, pp=2, dp_shard=32)
    assert step(shallow).seconds.value == step(shallow, calibration=quiet).seconds.value


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"global_batch": 513}, "multiple of dp × micro_batch = 16"),
        ({"global_batch": 0}, "integer ≥ 1"),
        ({"seq_len": 0}, "integer ≥ 1"),
        ({"topology": machine(8)}, "at most the topology's 64 devices"),
        ({"algorithm": "fastest"}, "one of auto"),
    ],
)
def test_bad_input(change: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        step(**change)


def test_no_torch() -> None:
    code = "import sys, laneway.cluster.costs; sys.exit('torch' in sys.modules or 'pandas' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
