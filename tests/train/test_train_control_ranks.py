"""Controls over several ranks: shards decide and correct as the whole does, ranks decide alike, collectives are counted."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import scheduler_ranks
import torch

from laneway.train.settings import to_toml

pytestmark = pytest.mark.distributed
FAULT = [step in range(9, 12) for step in range(1, 13)]


@pytest.fixture(scope="module")
def folder(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from laneway.data.text import TextDataConfig
    from laneway.models.gpt import GPTConfig
    from laneway.train.config import TrainConfig

    folder = tmp_path_factory.mktemp("ranks")
    config = TrainConfig(
        model=GPTConfig(context=16, layers=4, heads=2, dim=8, streams=3),
        data=TextDataConfig(path=str(text_file), cache=str(text_file.parent / "cache"), validation_fraction=0.2),
        steps=12,
        batch_size=4,
        device="cpu",
        validate_every=0,
        validation_batches=1,
        checkpoint_every=0,
        probe_every=0,
        sample_tokens=0,
    )
    (folder / "c.toml").write_text(to_toml(dataclasses.replace(config)), "utf-8")
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    command = [sys.executable, str(Path(__file__).with_name("control_ranks.py")), str(folder)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"rank{rank}.json").read_text("utf-8")) for rank in range(2)]


def test_ranks_find_the_same(ranks):
    assert ranks[0] == ranks[1]


def test_shards_are_read_judged_and_corrected_as_the_whole(ranks):
    found = ranks[0]["shards"]["purifier"]
    assert found["quantiles"] < 0.05
    assert found["difference"] < 1e-3
    for step, (collectives, whole, sharded_collectives, sharded) in enumerate(found["rows"], 1):
        assert whole == sharded == FAULT[step - 1]
        assert collectives == 0
        checked = step % 2 == 0 or whole or step == 12
        assert sharded_collectives in ({3, 4} if whole else {3} if checked else {1})


def test_a_guard_of_shards_takes_one_collective(ranks):
    found = ranks[0]["shards"]["guard"]
    assert found["difference"] < 1e-3
    for step, (collectives, whole, sharded_collectives, sharded) in enumerate(found["rows"], 1):
        assert (collectives, sharded_collectives) == (0, 1)
        assert whole == sharded == FAULT[step - 1]


def test_a_step_under_any_control_takes_one_collective_beside_those_of_ddp(ranks):
    for name, counts in ranks[0]["counted"].items():
        assert [step - own for own, step in counts] == [1] * 6, name


def test_in_a_run_whole_gradients_cost_no_collective(ranks):
    assert ranks[0]["ddp now"]["counts"] == ranks[0]["ddp off"]["counts"]
    assert ranks[0]["ddp now"]["purified"] == [int(fault) for fault in FAULT]


def test_a_late_screen_of_shards_costs_none_between_checks(ranks):
    off, late = (ranks[0][f"fsdp {name}"] for name in ("off", "late"))
    assert late["purified"] == [int(FAULT[step] and (FAULT[step - 1] or step % 2 == 1)) for step in range(12)]
    extra = [b - a for a, b in zip(off["counts"], late["counts"], strict=True)]
    for step in range(1, 8):  # before the fault
        assert extra[step] == (2 if (step + 1) % 2 == 0 else 0)


def test_a_scheduler_decides_alike_on_all_ranks_and_in_shards(ranks):
    """That ranks decide alike of different tokens is ``test_ranks_find_the_same``: their hashes of every step are in it."""
    ddp, fsdp = (ranks[0]["scheduler"][kind] for kind in ("ddp", "fsdp"))
    assert len(set(ddp["hashes"])) == 4  # what holds at first, and three measurements that are followed
    assert len(ddp["hashes"]) == len(fsdp["hashes"]) == scheduler_ranks.STEPS
    assert [row[0] for row in fsdp["rows"]] == pytest.approx([row[0] for row in ddp["rows"]], rel=1e-4)
    for name in scheduler_ranks.DECIDED:
        torch.testing.assert_close(*(torch.tensor(found["last"][name]) for found in (fsdp, ddp)), rtol=1e-2, atol=1e-3)
    assert torch.tensor(ddp["last"]["damping"]).min() < 0.9


def test_ranks_and_micro_batches_schedule_as_one_process(ranks, folder, one_thread):
    """Without damping, whose sample is each rank's own: losses, norms and shares of use are those of all tokens."""
    alone, together = scheduler_ranks.run(folder, "none", "alone", damping=0.0), ranks[0]["scheduler"]["undamped"]
    for place in (0, 1):
        assert [row[place] for row in together["rows"]] == pytest.approx([row[place] for row in alone["rows"]], rel=1e-4)
    assert torch.tensor(alone["last"]["demand"]).abs().max() > 0.01
    torch.testing.assert_close(*(torch.tensor(found["last"]["demand"]) for found in (together, alone)), rtol=1e-3, atol=1e-4)


def test_a_scheduler_in_shards_resumes_bit_for_bit(ranks):
    """The checkpoint holds a measurement that is followed in the next step."""
    found = ranks[0]["scheduler"]
    assert found["parts"]["hashes"] == found["fsdp"]["hashes"][: scheduler_ranks.STOP - 1]
    assert found["resumed"]["hashes"] == found["fsdp"]["hashes"][scheduler_ranks.SAVED :]
    assert found["resumed"]["rows"] == found["fsdp"]["rows"]
    assert found["resumed"]["last"] == found["fsdp"]["last"]
