"""Two and four processes train the curve of one, in every way a layout can lay them."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import torchrun
from wrapping import WAYS, model, train

from laneway.cluster.layout import Layout
from laneway.strategy.wrap import wrap_model

pytestmark = pytest.mark.distributed

SCRIPT = str(Path(__file__).with_name("wrapping.py"))
CASES = [(world, name) for world, ways in WAYS.items() for name in ways]
BOUND = 3e-6  # relative: fp32 sums in another order, through two steps of AdamW
BF16 = 2e-2  # bf16 keeps 8 bits: rounding of sub-layers, the reduced gradients and their sums


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    found = {}
    for world in WAYS:
        folder = tmp_path_factory.mktemp(f"wrapping{world}")
        torchrun(world, SCRIPT, ".", cwd=folder)
        found[world] = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world)]
    return found


@cache
def one() -> dict[str, Any]:
    return train(wrap_model(model(), Layout(precision="fp32", micro_batch=2), device="cpu"))


def bound_of(name: str) -> float:
    return BF16 if name.endswith("bf16") else BOUND


@pytest.mark.parametrize(("world", "name"), CASES)
def test_losses_and_norms_are_those_of_one_process(ranks, world, name):
    found = ranks[world][0]["ways"][name]
    assert found["losses"] == pytest.approx(one()["losses"], rel=bound_of(name))
    assert found["norms"] == pytest.approx(one()["norms"], rel=bound_of(name))
    assert one()["norms"][0] > 0.4  # so the bound of 0.3 below really clips


@pytest.mark.parametrize(("world", "name"), CASES)
def test_clipped_gradients_have_the_asked_norm(ranks, world, name):
    """Neither summed over replicas nor that of one shard."""
    assert ranks[world][0]["ways"][name]["clipped"] == pytest.approx(0.3, rel=1e-4)


@pytest.mark.parametrize(("world", "name"), CASES)
def test_weights_come_out_whole_under_the_plain_names(ranks, world, name):
    weights, expected = ranks[world][0]["ways"][name]["weights"], one()["weights"]
    assert set(weights) == set(expected) == set(model().state_dict())
    assert list(weights.values()) == pytest.approx([expected[key] for key in weights], rel=bound_of(name), abs=bound_of(name))


@pytest.mark.parametrize(("world", "name"), CASES)
def test_every_rank_sees_the_same_figures(ranks, world, name):
    first, *others = (found["ways"][name] for found in ranks[world])
    for other in others:
        assert (other["losses"], other["norms"]) == (first["losses"], pytest.approx(first["norms"], rel=1e-7))


def test_the_memory_manager_moved_something(ranks):
    assert all(found["ways"]["ddp-memory"]["moved"] > 0 for found in ranks[2])


@pytest.mark.parametrize("world", WAYS)
def test_stages_have_the_bits_of_the_whole_model(ranks, world):
    """1F1B, GPipe and interleaved: losses and all gradients, and both copies of the tied embedding."""
    assert all(case == [] for found in ranks[world] for case in found["bits"])
    assert len(ranks[world][0]["bits"]) == (4 if world == 2 else 2)


@pytest.mark.parametrize("world", WAYS)
def test_the_mesh_is_made_once_in_the_given_order_whatever_groups_there_were(ranks, world):
    for rank, found in enumerate(ranks[world]):
        seen = found["meshes"]
        assert seen["again"]
        assert seen["ring"] == list(reversed(range(world)))
        assert seen["place"] == world - 1 - rank
        assert seen["flattened"] == [world, world]
        assert seen["machine"] == list(range(rank % 2, world, 2))  # tp within a machine, though ranks went round them


@pytest.mark.parametrize("world", WAYS)
def test_what_does_not_fit_the_ranks_is_said_on_all_of_them(ranks, world):
    for found in ranks[world]:
        seen = found["meshes"]
        assert seen["world"].startswith(f"the plan needs {3 * world} processes (dp_shard {world} × tp 3), but {world} run; start")
        assert seen["order"].startswith("order: got")
        assert seen["elsewhere"]
        assert seen["different"].startswith("the ranks ask for different meshes")


def test_one_process_needs_no_group():
    assert not torch.distributed.is_initialized()
    assert all(math.isfinite(loss) for loss in one()["losses"])
