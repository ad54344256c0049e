"""Two ranks, of which one runs out of memory: both repeat, neither waits for ever, and the bits are DDP's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from launch import torchrun

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("survival")
    torchrun(2, str(Path(__file__).with_name("survival.py")), ".", cwd=folder)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("way", ["replayed", "retried"])
def test_a_failure_of_one_rank_at_any_allocation_changes_no_bit_of_ddp(ranks, way):
    """Of two steps with accumulation, in DDP under no_sync and bare by turns."""
    for found in ranks:
        assert found[way]["wrong"] == []
        assert found[way]["tried"] >= 60
    assert "replay" in ranks[0][way]["kinds"]  # it had not failed and repeated all the same
    assert ("op_retry" in ranks[1][way]["kinds"]) == (way == "retried")


def test_where_one_never_has_the_memory_both_stop_and_say_so(ranks):
    first, second = (found["gives_up"] for found in ranks)
    assert first["said"] == "another rank ran out of memory in each of 5 tries of a micro-batch; see its error"
    assert second["said"].startswith("out of memory in each of 5 tries of a micro-batch, last in micro (survival.py:")
    assert first["kinds"] == second["kinds"] == ["replay", "replay", "split", "split"]


def test_gradients_that_a_rank_lacks_count_as_zero(ranks):
    for found in ranks:
        assert found["uneven"] == {"both": [1.5] * 3, "one": [0.5] * 3, "none": None, "low": [1.0] * 6}


def test_a_rank_without_room_for_a_bucket_stops_both(ranks):
    for found in ranks:
        assert found["no_room"]["said"].startswith("out of memory for the buckets of 26214400 bytes")
        assert found["no_room"]["kept"]


def test_models_that_communicate_in_a_micro_batch_are_refused(ranks):
    without, broadcasts = ranks[0]["refusals"]["said"]
    assert without.startswith("DDP reduces gradients within the backward pass")
    assert broadcasts.startswith("DDP broadcasts the model's buffers in its forward pass")


def test_under_fsdp_ops_are_tried_again_and_nothing_more(ranks):
    for rank, found in enumerate(ranks):
        case = found["sharded"]
        assert case["counts"] == ({"op_retry": 1} if rank == 1 else {})
        assert case["left"] == 0
        assert "Under FSDP2 a micro-batch can't be run again" in case["said"]
        assert case["reduce"].startswith("reduce_gradients averages whole gradients")
