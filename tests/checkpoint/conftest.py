from pathlib import Path

import pytest
import torch

from laneway.checkpoint import CheckpointStore
from laneway.rundir import RunDirectory


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    folder = tmp_path / "run"
    folder.mkdir()
    return RunDirectory(folder)


@pytest.fixture
def store(run: RunDirectory) -> CheckpointStore:
    return CheckpointStore(run)


@pytest.fixture
def three(run: RunDirectory) -> CheckpointStore:
    """A store with checkpoints of steps 1, 2 and 3, whose ``w`` is filled with the step."""
    store = CheckpointStore(run, keep=3)
    for step in (1, 2, 3):
        store.save(step, {"w": torch.full((5,), float(step)), "cursor": step})
    return store
