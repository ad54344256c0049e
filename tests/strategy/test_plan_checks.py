"""Plans that were written by hand, odd degrees and odd clusters: refused by name, or planned so that they divide and fit."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from clusters import SMALL, h100

from laneway.cluster.architecture import Architecture
from laneway.cluster.costs import Calibration, Group, estimate_step, place
from laneway.cluster.costs.data import shared_parameters
from laneway.cluster.layout import Layout
from laneway.cluster.topology import Topology
from laneway.core import InputError
from laneway.strategy.auto import auto_config
from laneway.strategy.flat import compared_with_flat
from laneway.strategy.refuse import DoesNotFitError
from laneway.strategy.search import usable_bytes
from laneway.strategy.space import Job
from laneway.strategy.strategy import Strategy


@pytest.fixture(scope="module")
def plan() -> Strategy:
    return auto_config(arch=SMALL, hardware_topology=h100(2), global_batch=64)


def edited(plan: Strategy, path: str, value: object) -> dict[str, Any]:
    """The plan as it would be read from a file, with one value changed by hand."""
    data = copy.deepcopy(plan.to_dict())
    *way, last = path.split(".")
    table = data
    for name in way:
        table = table[int(name)] if name.isdigit() else table[name]
    assert (last in table) or last.isdigit()
    table[int(last) if last.isdigit() else last] = value  # type: ignore[index]
    return data


@pytest.mark.parametrize(
    ("path", "value"),
    [
        *product(
            (
                "arch.layers",
                "arch.hidden",
                "arch.heads",
                "arch.kv_heads",
                "arch.vocab",
                "arch.streams",
                "seq_len",
                "global_batch",
            ),
            (0, -1, 10**30),
        ),
        *product(("layout.ep", "layout.micro_batch", "layout.chunks", "layout.zero", "layout.grad_bytes"), (0, -1, 7, 10**30)),
        *product(("topology.device.flops.bf16", "topology.device.memory_bytes", "model_size"), (0.0, -1.0, float("nan"))),
        *product(("predicted.seconds.value", "predicted.breakdown.compute"), (0.0, 1e30, float("nan"), float("inf"))),
        ("predicted.mfu", -1.0),
        ("predicted.bytes_per_level.L1", float("inf")),
        ("checkpoint.interval_s", -1.0),
        ("memory", "disk"),
        ("arch.experts", -1),
        ("arch.experts_per_token", 2),
        ("topology.device.memory_bytes", 1e9),
        ("version", True),
        ("calibration.matmul_fraction", 2.0),
    ],
)
def test_a_plan_edited_into_nonsense_is_refused(plan: Strategy, path: str, value: object) -> None:
    with pytest.raises(InputError, match=r"^(plan|calibration)") as caught:
        Strategy.from_dict(edited(plan, path, value))
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("fixed", "field"),
    [
        ({"cp": 2}, "cp"),
        ({"cp": 3}, "cp"),
        ({"tp": 16}, "tp"),
        ({"pp": 7}, "pp"),
        ({"dp_shard": 5}, "dp_shard"),
        ({"ep": 2}, "ep"),
    ],
)
def test_a_degree_that_cannot_be_had_is_named_with_those_that_can(fixed: dict[str, int], field: str) -> None:
    with pytest.raises(InputError, match=rf"^fixed\.{field}: got {fixed[field]}; accepted: .* here 1\b") as caught:
        auto_config(arch=SMALL, hardware_topology=h100(2), seq_len=2047, fixed=fixed)
    could = re.findall(r"\d+", caught.value.accepted.split("here ")[1])
    for value in could:
        assert getattr(auto_config(arch=SMALL, hardware_topology=h100(2), seq_len=2047, fixed={field: int(value)}).layout, field)


@pytest.mark.parametrize("fixed", [{"micro_batch": 3}, {"dp_shard": 4}, {"cp": 2}, {"micro_batch": 48, "pp": 2}])
def test_a_fixed_degree_need_not_be_one_that_a_search_tries(fixed: dict[str, int]) -> None:
    plan = auto_config(arch=SMALL, hardware_topology=h100(1), seq_len=512, fixed=fixed)
    assert {name: getattr(plan.layout, name) for name in fixed} == fixed
    assert plan.global_batch % (plan.layout.dp * plan.layout.micro_batch) == 0


def test_a_batch_that_a_fixed_micro_batch_does_not_divide_names_one_that_it_does() -> None:
    arguments: dict[str, Any] = {"arch": SMALL, "hardware_topology": h100(1), "fixed": {"micro_batch": 3}}
    with pytest.raises(InputError, match=r"^global_batch: got 64; .* such as") as caught:
        auto_config(global_batch=64, **arguments)
    for batch in re.findall(r"\d+", caught.value.accepted):
        assert auto_config(global_batch=int(batch), **arguments).layout.micro_batch == 3


def test_what_fits_on_fewer_devices_is_told_as_such() -> None:
    with pytest.raises(DoesNotFitError, match="another number of devices, such as") as caught:
        auto_config("1.3B", "7xA100_7nodes", seq_len=131_072)
    assert caught.value.devices is not None
    wide = Architecture(layers=8, hidden=448, heads=7, kv_heads=7, ffn=1792, vocab=1_000_003)
    arguments: dict[str, Any] = {"arch": wide, "hardware_topology": h100(1, 4.8e9), "seq_len": 128}
    with pytest.raises(DoesNotFitError, match="needs another global_batch") as caught:
        auto_config(global_batch=1, **arguments)
    assert caught.value.devices == auto_config(global_batch=8, **arguments).world == 8


def test_odd_clusters_and_shapes_divide_and_fit() -> None:
    arch = Architecture(
        layers=13, hidden=7 * 64, heads=7, kv_heads=7, ffn=333, vocab=50257, experts=5, experts_per_token=2, streams=3
    )
    for topology in ("7xA100_3nodes", "1xCPU", "3xH100_5nodes", "8xH100_1node+4xH100_2nodes", "2xMI300X_3nodes_2racks"):
        plan = auto_config(arch=arch, hardware_topology=topology, seq_len=1001)
        it = plan.layout
        assert it.world == plan.topology.world
        assert plan.global_batch % (it.dp * it.micro_batch) == arch.layers % (it.pp * it.chunks) == 0
        assert not any(size % it.tp for size in (arch.heads, arch.ffn, arch.vocab))
        assert not it.sequence_parallel or plan.seq_len % it.tp == 0
        job = Job(arch, plan.topology, plan.global_batch, plan.seq_len)
        assert plan.predicted.memory.total <= usable_bytes(job)
        assert Strategy.from_dict(plan.to_dict()) == plan


def test_a_precision_that_the_device_lacks_is_refused() -> None:
    with pytest.raises(InputError, match=r"^precision: got 'fp8'; accepted: .*A100 has no fp8"):
        auto_config("7B", "8xA100_4nodes", precision="fp8")
    assert auto_config("7B", "8xH100_4nodes", precision="fp8").layout.precision == "fp8"


@pytest.mark.parametrize("change", [{"heads": 7}, {"kv_heads": 3}, {"experts": 4}, {"experts_per_token": 1}, {"experts": -1}])
def test_shapes_that_no_model_has(change: dict[str, int]) -> None:
    with pytest.raises(InputError, match=r"^arch\."):
        auto_config(arch=replace(SMALL, **change), hardware_topology="8xH100")


def test_a_size_smaller_than_its_vocabulary_is_bad_input() -> None:
    with pytest.raises(InputError, match=r"^model_size: got 1000000"):
        auto_config(1e6, "1xCPU")


def test_a_calibration_goes_with_its_plan() -> None:
    slow = Calibration(matmul_fraction=0.2, flash_attention=False)
    plan = auto_config(arch=SMALL, hardware_topology=h100(2), global_batch=64, calibration=slow)
    assert Strategy.from_dict(plan.to_dict()).calibration == slow
    assert plan.scaled_to(16).predicted == plan.predicted
    default = auto_config(arch=SMALL, hardware_topology=h100(2), global_batch=64)
    assert compared_with_flat(plan).seconds > 1.1 * compared_with_flat(default).seconds


def test_scores_of_attention_count_in_what_fits() -> None:
    stored, found = Calibration(flash_attention=False), []
    for gigabytes in (3.0, 4.0, 6.0, 80.0):
        cluster = h100(1, gigabytes * 1e9)
        plan = auto_config(arch=SMALL, hardware_topology=cluster, global_batch=64, fixed={"micro_batch": 4}, calibration=stored)
        assert plan.predicted.memory.total <= 0.95 * gigabytes * 1e9
        found.append(plan.layout.recompute)
    assert found[-1] == "none"
    assert len(set(found)) > 1


def test_collectives_that_are_told_are_those_that_are_priced() -> None:
    plan = auto_config("13B", "8xA100_4nodes", seq_len=4096, fixed={"pp": 2})
    parts = shared_parameters(plan.arch, plan.layout)
    told = {each.nbytes for each in plan.collectives if each.op == "reduce_scatter"}
    assert told == {part.parameters / part.messages * plan.layout.grad_bytes for part in parts if part.shards.size > 1}


def test_gradients_of_experts_go_to_those_who_hold_them() -> None:
    arch = replace(SMALL, experts=8, experts_per_token=2)
    one, all_of_them = (Layout(dp_shard=8, ep=ep, micro_batch=2) for ep in (1, 8))
    for layout, ranks in ((one, 8), (all_of_them, 1)):
        dense, experts = shared_parameters(arch, layout)
        assert (dense.shards, experts.shards) == (Group(8), Group(ranks, layout.ep))
    states = [
        sum(part.parameters / part.shards.size for part in shared_parameters(arch, layout)) for layout in (one, all_of_them)
    ]
    assert states[0] == states[1]
    sent = [
        estimate_step(arch, layout, h100(1), global_batch=16, seq_len=16).bytes_per_level["L1"] for layout in (one, all_of_them)
    ]
    assert sent[1] < sent[0] / 2


def test_recomputed_attention_over_ranks_sends_its_messages_again() -> None:
    none, full = (
        estimate_step(SMALL, Layout(cp=8, recompute=recompute), h100(1), global_batch=1, seq_len=8192).bytes_per_level["L1"]
        for recompute in ("none", "full")
    )
    keys_and_values = 7 * 2 * SMALL.hidden * 2 * 8192 / 8 * SMALL.layers
    assert full - none == pytest.approx(keys_and_values)


def test_ragged_groups_are_placed_as_the_worst_of_them_lies() -> None:
    ragged = Topology.parse("8xH100_1node+4xH100_2nodes")
    for size, stride in ((2, 1), (4, 1), (8, 1), (4, 2), (2, 8), (16, 1), (4, 4)):
        span = size * stride
        copies = [range(block + offset, block + span, stride) for block in range(0, 16, span) for offset in range(stride)]
        assert place(Group(size, stride), ragged).units[0] == max(place(list(copy), ragged).units[0] for copy in copies)
    assert place(Group(8), ragged).units == (2, 1)


def test_energy_counts_what_the_levels_carry(plan: Strategy) -> None:
    joules = 3e-6
    table = plan.topology
    dear = replace(table, levels=tuple(replace(level, joules_per_byte=joules) for level in table.levels))
    free = replace(table, levels=tuple(replace(level, joules_per_byte=0.0) for level in table.levels))
    more, less = (estimate_step(SMALL, plan.layout, each, global_batch=64, seq_len=2048) for each in (dear, free))
    sent = sum(more.bytes_per_level.values()) * plan.world
    assert more.kwh_per_token - less.kwh_per_token == pytest.approx(joules * sent / 3.6e6 / (64 * 2048))
    assert more.seconds == less.seconds


@pytest.mark.parametrize("topology", ["4xB200_33nodes", "1xH200_9nodes", "8xH100_24nodes", "6xA100_10nodes"])
def test_the_usual_batch_leaves_the_large_data_parallel_sizes(topology: str) -> None:
    plan = auto_config("30B", topology, seq_len=128)
    assert plan.global_batch % plan.world == 0


@pytest.mark.parametrize("levels", [[{"size": 8, "name": "a"}, {"size": 2, "name": "a"}], [{"size": 8, "links": 10**400}]])
def test_levels_that_would_be_counted_wrong(levels: list[dict[str, Any]]) -> None:
    with pytest.raises(InputError, match=r"^(levels|L1\.links): "):
        Topology.parse({"device": "H100", "levels": levels})
