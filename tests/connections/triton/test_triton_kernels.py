"""Runs the tests in interpreted/ where Triton interprets its kernels: each file in a process with TRITON_INTERPRET=1."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="no triton here (it is published for Linux)")
FOLDER = Path(__file__).with_name("interpreted")


@pytest.mark.parametrize("file", sorted(path.name for path in FOLDER.glob("test_*.py")))
def test_interpreted(file):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER / file)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def test_laneway_imports_without_triton():
    code = """
import sys
sys.modules["triton"] = None
import laneway, laneway.connections.layer, laneway.connections.kernels, laneway.bench.triton_aot
laneway.HyperConnection(8, 4)
try:
    import laneway.connections.kernels.triton.backend
except ImportError:
    print("refused")
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "refused\n"
