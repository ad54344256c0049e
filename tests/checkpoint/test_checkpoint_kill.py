"""SIGKILL while saving, at every call that changes the disk and at random moments: the newest checkpoint always loads."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("kill_script.py")


def script(*args) -> dict:
    done = subprocess.run(
        [sys.executable, SCRIPT, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.timeout(120)
def test_killed_before_every_call_that_changes_the_disk(tmp_path):
    result = script("calls", tmp_path)
    assert result["kills"] > 30
    assert 10 < result["before"] < result["kills"]


@pytest.mark.timeout(120)
def test_killed_at_random_moments(tmp_path):
    result = script("random", tmp_path, 25, 7)
    assert result["kills"] == 25
    assert result["before"] >= 3, "some kills must come in the middle of a save"
    assert result["step"] > 0
