"""Several ranks (gloo processes): sharded and resharded state, and one rank's failure as everyone's clear error."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ranks_script
import torch

from laneway.checkpoint import CheckpointStore, load_export, restore
from laneway.rundir import RunDirectory

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(140)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> Path:
    """The folder in which all groups of ranks have done their cases; each has its time limit."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, ranks_script.__file__, folder]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=130)
    ended = {path.stem: path.read_text() for path in folder.glob("*.status")}
    expected = {f"{group}_{rank}": "0" for group, (size, _) in ranks_script.GROUPS.items() for rank in range(size)}
    assert ended == {**expected, "lost_1": "-9"}, done.stderr[-5000:]
    return folder


def results(folder: Path, case: str, size: int, ranks: int | None = None) -> list[dict]:
    """What each rank returned from a case."""
    return [json.loads((folder / f"{case}_{size}_{rank}.json").read_bytes()) for rank in range(ranks or size)]


def test_every_rank_writes_its_part_and_rank_0_the_manifest(ranks):
    for result in results(ranks, "save", 2):
        assert result["files"] == [".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json", "plain.json"]
        assert result["latest"] == 3
    content = json.loads((ranks / "fsdp/checkpoints/step_00000003/manifest.json").read_bytes())
    assert content["world_size"] == 2
    assert set(content["files"]) == {".metadata", "__0_0.distcp", "__1_0.distcp", "plain.json"}


@pytest.mark.parametrize("wrap", ["fsdp", "ddp"])
def test_one_process_without_a_group_loads_it(ranks, wrap):
    model, optimizer = ranks_script.build("none")
    found = restore(CheckpointStore(RunDirectory(ranks / wrap)), 3, model, optimizer)
    expected = torch.load(ranks / f"{wrap}.pt", weights_only=True)
    now = ranks_script.whole(model, optimizer)
    for name, value in expected["model"].items():
        assert torch.equal(now["model"][name], value), name
    for name, entry in expected["optimizer"].items():
        assert {key: torch.equal(now["optimizer"][name][key], value) for key, value in entry.items()} == dict.fromkeys(
            entry, True
        )
    assert found.per_rank["rank"] == 0
    torch.set_rng_state(found.per_rank["rng"]["torch"])
    assert torch.rand(1).item() == results(ranks, "save", 2)[0]["draw"]
    assert model.head.weight is model.embed.weight


def test_training_goes_on_as_in_one_process(ranks):
    """Three steps on two ranks, then two alone, are five alone, to rounding."""
    model, optimizer = ranks_script.build("none")
    restore(CheckpointStore(RunDirectory(ranks / "fsdp")), 3, model, optimizer)
    ranks_script.train(model, optimizer, range(3, 5))
    alone, alone_optimizer = ranks_script.build("none")
    ranks_script.train(alone, alone_optimizer, range(5))
    for (name, value), other in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6, msg=name)


def test_two_ranks_load_under_either_wrapping(ranks):
    for result in results(ranks, "load", 2):
        assert result == {"fsdp-fsdp": [], "fsdp-ddp": [], "ddp-fsdp": [], "ddp-ddp": []}


def test_three_ranks_load_what_two_saved(ranks):
    first, second, third = results(ranks, "load", 3)
    assert first == second == third
    assert len(first) == 4
    for notices in first.values():
        assert notices == ["step_00000003, rank 2: the checkpoint has no per_rank for this rank; it is left as it is"]


@pytest.mark.parametrize("wrap", ["fsdp", "ddp"])
def test_export_of_a_wrapped_model_has_plain_names_and_whole_tensors(ranks, wrap):
    weights, config = load_export(ranks / f"{wrap}_export")
    expected = torch.load(ranks / f"{wrap}.pt", weights_only=True)["model"]
    assert config == {"dim": 5}
    assert set(weights) == set(expected)
    assert all(torch.equal(weights[name], value) for name, value in expected.items())
    assert weights["head.weight"] is weights["embed.weight"]


def test_one_rank_s_error_is_raised_on_all(ranks):
    zero, one = results(ranks, "errors", 2)
    assert zero["bad value"] == (
        "LanewayError: saving step 2 failed on rank 1: state.x: got 'set'; accepted: tensors, numpy arrays, None, bool, int, "
        "float, str, bytes, and lists, tuples and dicts of these"
    )
    assert one["bad value"].startswith("InputError: state.x")
    assert "rank 1: step: got -1" in zero["bad step"]
    assert one["bad step"].startswith("InputError: step")
    for rank, said in enumerate((zero, one)):
        assert said["other step"] == f"LanewayError: saving step {2 + rank}: the ranks named different steps: 2, 3"
        assert "the ranks named different steps: 1, 2" in said["other step loaded"]
        assert "failed on rank 1: " in said["misfit"]
        assert "float32 [50000] in the checkpoint, float32 [50001] here" in said["misfit"]
        assert "failed on rank 1: " in said["other disk"]
        assert "all ranks need the same file system" in said["other disk"]
        assert "saving step 2 failed on rank 1: the file would be larger than" in said["no room on rank 1"]
        assert "saving step 2 failed on rank 0: the file would be larger than" in said["no room on rank 0"]
    assert "failed on rank 0: config: got" in one["bad export"]
    assert zero["bad export"].startswith("InputError: config")
    assert not (ranks / "errors/model").exists()


def test_all_ranks_fall_back_to_the_same_checkpoint(ranks):
    zero, one = results(ranks, "torn", 2)
    assert (zero["step"], zero["w"], zero["mine"]) == (1, [1.0] * 4, 1)
    assert (one["step"], one["w"], one["mine"]) == (1, [1.0] * 4, 11)
    assert len(zero["notices"]) == 1
    assert "__1_0.distcp has 4 of " in zero["notices"][0]
    events = [event["message"] for event in RunDirectory(ranks / "torn/run").read_events()]
    assert events == zero["notices"]


def test_a_rank_that_is_killed_does_not_hang_the_other(ranks):
    (zero,) = results(ranks, "killed", 2, ranks=1)
    assert "saving step 2: rank 0 lost contact with another rank" in zero["error"]
    assert zero["names"] == ["step_00000001"]
    store = CheckpointStore(RunDirectory(ranks / "killed/run"))
    assert store.latest_step() == 1
    assert store.run.latest.read_text() == "step_00000001\n"
