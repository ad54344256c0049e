"""A measurement on eight real gloo ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed
HERE = Path(__file__).parent


def test_ranks_measure_one_network_and_a_table_comes_of_it(tmp_path: Path) -> None:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, str(HERE / "eight_ranks.py"), str(tmp_path), "measure_cases", "1"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [json.loads((tmp_path / f"rank{rank}.json").read_text("utf-8")) for rank in range(8)] == [{"measured": []}] * 8
