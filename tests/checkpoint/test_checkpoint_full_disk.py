"""A save that finds no room fails with one clear line and leaves what was there: on a real full disk and at a real size limit."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from laneway.checkpoint import CheckpointStore, export, load_export
from laneway.core import LanewayError
from laneway.rundir import RunDirectory

PAGE = 4096


@pytest.fixture
def disk(tmp_path: Path):
    """A disk of 256 KiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def state(value: float, size: int = 5000) -> dict:
    return {"w": torch.full((size,), float(value)), "note": "x" * 6000}


def assert_intact(run: RunDirectory, step: int) -> None:
    assert run.latest.read_text() == f"step_{step:08d}\n"
    assert [path.name for path in run.checkpoints.iterdir()] == [f"step_{step:08d}"]
    assert sorted(path.name for path in run.path.iterdir() if path.name != "filler") == ["checkpoints", "latest"]
    store = CheckpointStore(run)
    assert store.latest_step() == step
    target = {"w": torch.zeros(5000)}
    store.load(step, target)
    assert (target["w"] == step).all()
    assert store.notices == []


def failure_of(action) -> str | None:
    try:
        action()
    except LanewayError as error:
        return str(error)
    return None


def free_pages(folder: Path) -> int:
    return os.statvfs(folder).f_bavail


def test_full_disk_at_every_page(disk):
    """Room for 0, 1, 2, ... pages: the disk gets full in every file and in the folders, until the save fits."""
    run = RunDirectory(disk)
    store = CheckpointStore(run, keep=1)
    store.save(1, state(1))
    step, failures = 1, 0
    for pages in range(30):
        filler = disk / "filler"
        filler.write_bytes(b"x" * PAGE * (free_pages(disk) - pages))
        assert free_pages(disk) == pages
        message = failure_of(partial(store.save, step + 1, state(step + 1)))
        if message is None:
            step += 1
        else:
            failures += 1
            assert f"saving step {step + 1} failed: no space left on the disk" in message, pages
            assert "MiB free" in message
            assert "\n" not in message
            assert free_pages(disk) == pages, "the unfinished files are gone"
        assert_intact(run, step)
        filler.unlink()
        if step > 2:
            break
    assert failures >= 8
    assert step > 2


def test_first_checkpoint_on_a_full_disk(disk):
    run = RunDirectory(disk)
    (disk / "filler").write_bytes(b"x" * PAGE * (free_pages(disk) - 2))
    store = CheckpointStore(run)
    with pytest.raises(LanewayError, match="no space left"):
        store.save(1, state(1))
    assert store.latest_step() is None
    assert not run.latest.exists()
    (disk / "filler").unlink()
    store.save(1, state(1))
    assert_intact(run, 1)


@pytest.mark.parametrize("pages", [0, 1, 5, 11])
def test_export_on_a_full_disk_keeps_the_older_export(disk, pages):
    export({"w": torch.ones(10000)}, {"version": 1}, disk / "model")
    (disk / "filler").write_bytes(b"x" * PAGE * (free_pages(disk) - pages))
    with pytest.raises(LanewayError, match=r"(?i)no space left on"):
        export({"w": torch.zeros(10000)}, {"version": 2, "note": "y" * PAGE}, disk / "model")
    weights, config = load_export(disk / "model")
    assert config == {"version": 1}
    assert (weights["w"] == 1).all()
    assert sorted(os.listdir(disk)) == ["filler", "model"]
    assert free_pages(disk) == pages


LIMITED = """
import json, resource, sys
from pathlib import Path
import torch
from laneway.checkpoint import CheckpointStore, export
from laneway.core import LanewayError
from laneway.rundir import RunDirectory
path, limits = Path(sys.argv[1]), json.loads(sys.argv[2])
state = {"w": torch.full((5000,), 2.0), "note": "x" * 6000}
store, hard = CheckpointStore(RunDirectory(path), keep=1), resource.getrlimit(resource.RLIMIT_FSIZE)[1]
messages = []
for limit in limits:
    for action in (lambda: store.save(2, state), lambda: export({"w": torch.ones(10000)}, {}, path.with_name("model"))):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            action()
            message = "saved"
        except LanewayError as error:
            message = str(error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        messages.append(message)
print(json.dumps(messages))
"""


@pytest.mark.timeout(60)
def test_a_limit_on_the_file_size(run):
    """``ulimit -f`` at sizes that stop the tensors, the plain data, the metadata and the manifest."""
    CheckpointStore(run).save(1, state(1))
    limits = [0, 10, 300, 700, 3000, 10000, 20500]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", LIMITED, run.path, json.dumps(limits)],
        capture_output=True,
        text=True,
        timeout=55,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    messages = json.loads(done.stdout)
    assert len(messages) == 2 * len(limits)
    for saved in messages[::2]:
        assert "larger than this process may write" in saved
    for exported in messages[1::2]:
        assert "File too large" in exported or "larger than this process may write" in exported
    assert_intact(run, 1)
    assert not run.path.with_name("model").exists()
    assert not run.path.with_name(".tmp_model").exists()
