"""Eight gloo ranks for the tests of a file, started once."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

START = Path(__file__).parent / "reduce" / "eight_ranks.py"
Found = list[dict[str, list[str]]]


@pytest.fixture(scope="session")
def eight_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Found]:
    """Runs the ``CASES`` of a module, given by its file, on eight ranks; what each rank found wrong, by case."""

    def run(cases: Path) -> Found:
        folder, seed = tmp_path_factory.mktemp("ranks"), random.randrange(2**31)
        environ = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": os.pathsep.join([str(cases.parent), *sys.path]),
        }
        command = [sys.executable, str(START), str(folder), cases.stem, str(seed)]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=150, check=False)
        assert done.returncode == 0, f"seed {seed}: {done.stderr[-3000:]}"
        return [json.loads((folder / f"rank{rank}.json").read_text("utf-8")) for rank in range(8)]

    return run
