"""The hooks on eight real gloo ranks, started once for the whole file."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed
HERE = Path(__file__).parent
START = HERE.parent / "reduce" / "eight_ranks.py"
NAMES = ["ddp", "accumulation", "unused", "exceptions", "dropping", "fsdp", "sharded_dropping", "refusals", "lost"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[str]]]:
    """What each rank found wrong, by case."""
    folder, seed = tmp_path_factory.mktemp("ranks"), random.randrange(2**31)
    environ = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]),
    }
    command = [sys.executable, str(START), str(folder), "hook_cases", str(seed)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, f"seed {seed}: {done.stderr[-3000:]}"
    return [json.loads((folder / f"rank{rank}.json").read_text("utf-8")) for rank in range(8)]


@pytest.mark.parametrize("name", NAMES)
def test_case(found: list[dict[str, list[str]]], name: str) -> None:
    assert [rank[name] for rank in found] == [[]] * 8


def test_every_case_ran(found: list[dict[str, list[str]]]) -> None:
    assert [list(rank) for rank in found] == [NAMES] * 8
