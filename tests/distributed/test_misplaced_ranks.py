"""Ranks that are not where the plan has them: groups follow the machines, not ``rank // devices``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launch import torchrun

pytestmark = pytest.mark.distributed


def test_shards_stay_on_one_machine_wherever_ranks_were_started(tmp_path: Path) -> None:
    done = torchrun(4, str(Path(__file__).with_name("misplaced.py")), ".", cwd=tmp_path)
    found = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(4)]
    for rank in range(4):
        assert set(found[rank]["dp_shard"]) == {rank % 2, rank % 2 + 2}  # both on this rank's machine
        assert set(found[rank]["dp_replicate"]) == {rank // 2 * 2, rank // 2 * 2 + 1}  # one on each
    assert "not where the plan has them" in done.stderr + done.stdout
