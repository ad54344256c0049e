"""torchrun on this machine, with what a failure needs to be understood."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CURVES = str(Path(__file__).with_name("curves.py"))
TRAIN = ("-m", "laneway", "train", "--config", "c.toml")


def torchrun(ranks: int, *command: str, cwd: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run ``command`` (a script or ``-m module``) on ``ranks`` processes with one thread each."""
    full = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *command]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    done = subprocess.run(full, cwd=cwd, env=env, capture_output=True, text=True, timeout=500, check=False)
    said = done.stderr.split('Traceback (most recent call last):\n  File "<frozen runpy>"')[0]  # then torchrun speaks of itself
    assert not check or done.returncode == 0, f"{done.stdout[-2000:]}\n{said[-6000:]}\n{done.stderr[-600:]}"
    return done
