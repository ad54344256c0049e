"""A disk that is full for some steps costs a run neither steps nor rows: rows wait, and the next interval saves."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from laneway.checkpoint import CheckpointStore, load_export
from laneway.core import LanewayError
from laneway.rundir import RunDirectory, read_rows
from laneway.train.config import TrainConfig
from laneway.train.loop import train
from laneway.train.patient import PatientRows


class Full:
    """Lets the disk be full from step ``first`` until step ``end`` begins."""

    def __init__(self, first: int, end: int, disk: Path | None) -> None:
        self.first, self.end, self.disk = first, end, disk
        self.hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]

    def on_step_begin(self, step: int) -> None:
        if step == self.first:
            self.fill()
        if step == self.end:
            self.free()

    def fill(self) -> None:
        if self.disk is None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, self.hard))
            return
        with (self.disk / "filler").open("wb", buffering=0) as file:
            for size in (1 << 16, 1 << 12, 1):
                try:
                    while file.write(b"x" * size) == size:
                        pass
                except OSError:
                    continue

    def free(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.hard, self.hard))
        if self.disk is not None:
            (self.disk / "filler").unlink(missing_ok=True)

    def on_backward_end(self, step: int) -> None: ...

    def on_step_end(self, step: int, metrics: dict[str, Any]) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@pytest.fixture(params=["a file system without room", "a limit on the size of files"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path | None]:
    """A folder of 8 MiB to be filled; None: files may not grow."""
    if "limit" in request.param:
        yield None
        return
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.fixture
def short(change) -> TrainConfig:
    return change(steps=12, checkpoint_every=3, validate_every=0, probe_every=0, sample_tokens=0, model={"layers": 1})


def go(config: TrainConfig, out: Path, full: Full) -> None:
    try:
        train(config, out=out, console=None, extensions=[full])
    finally:
        full.free()


def test_the_run_goes_on_and_nothing_is_missing(short, tmp_path, disk):
    train(short, out=tmp_path / "whole", console=None)
    out = (disk or tmp_path) / "run"
    go(short, out, Full(5, 8, disk))
    run = RunDirectory(out)
    assert [row["step"] for row in run.read_metrics()] == list(range(1, 13))
    events = run.read_events()
    failed = [event for event in events if event["kind"] == "checkpoint_failed"]
    assert [(event["step"], event["in_a_row"], event["newest"]) for event in failed] == [(6, 1, 3)]
    assert [event["step"] for event in events if event["kind"] == "checkpoint"] == [3, 9, 12]
    waited = sum("wait for room" in event.get("message", "") for event in events)
    assert waited == 1 or (waited == 0 and disk is not None)  # rows may have fitted into the last page of their file
    assert [event["time"] for event in events] == sorted(event["time"] for event in events)
    assert CheckpointStore(run).latest_step() == 12
    ours, theirs = (load_export(folder / "export")[0] for folder in (out, tmp_path / "whole"))
    assert all(ours[name].equal(theirs[name]) for name in theirs)


def test_after_so_many_failed_checkpoints_it_stops(short, change, tmp_path):
    config = change(**vars(short) | {"max_failed_checkpoints": 1, "model": {"layers": 1}})
    with pytest.raises(LanewayError, match="saving step 9 failed"):
        go(config, tmp_path / "run", Full(5, 99, None))
    assert CheckpointStore(RunDirectory(tmp_path / "run")).latest_step() == 3


def test_without_patience_a_full_disk_ends_the_run_at_once(short, change, tmp_path):
    config = change(**vars(short) | {"max_failed_checkpoints": 0, "model": {"layers": 1}})
    with pytest.raises(LanewayError, match="the run stopped"):
        go(config, tmp_path / "run", Full(5, 8, None))
    assert [row["step"] for row in RunDirectory(tmp_path / "run").read_metrics()] == [1, 2, 3, 4]


def test_rows_wait_in_their_order(tmp_path):
    rows, full = PatientRows(tmp_path / "rows", patient=True), Full(0, 0, None)
    rows.append({"n": 0})
    full.fill()
    try:
        rows.append({"n": 1, "text": "ä" * 100})
        rows.append({"n": 2})
        with pytest.raises(OSError, match="large"):
            rows.flush()
    finally:
        full.free()
    assert [row["n"] for row in read_rows(rows.path)] == [0]
    rows.append({"n": 3})
    assert [row["n"] for row in read_rows(rows.path)] == [0, 1, 2, 3]


def test_other_errors_are_raised(tmp_path):
    (tmp_path / "rows").mkdir()
    with pytest.raises(IsADirectoryError):
        PatientRows(tmp_path / "rows", patient=True).append({"n": 1})
