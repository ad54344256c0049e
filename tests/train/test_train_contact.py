"""The options of a run that survives the loss of a rank: their checks, and one command for the first start and later ones."""

from __future__ import annotations

import dataclasses
import threading
import time

import pytest

from laneway.cli import train as cli
from laneway.core import InputError
from laneway.rundir import RunDirectory
from laneway.train.config import TrainConfig
from laneway.train.loop import train
from laneway.train.place import claimed
from laneway.train.resume import check_same_run


@pytest.fixture
def short(config: TrainConfig) -> TrainConfig:
    return dataclasses.replace(config, steps=2, validate_every=0, checkpoint_every=0, sample_tokens=0)


@pytest.mark.parametrize("seconds", [-1.0, 0.5, float("inf"), float("nan")])
def test_the_limit_is_checked(seconds):
    problems = TrainConfig(failure_timeout=seconds).problems()
    assert [problem.field for problem in problems] == ["failure_timeout"]


def test_flags():
    request = cli.read_request(["tiny", "--out", "x", "--resume-or-start", "--failure-timeout", "20"])
    assert (request.resume_or_start, request.resume, request.settings.failure_timeout) == (True, False, 20.0)
    for flags in (["tiny", "--resume-or-start"], ["tiny", "--resume-or-start", "--resume", "--out", "x"]):
        with pytest.raises(InputError, match="resume_or_start: got True"):
            cli.read_request(flags)


def test_the_same_call_starts_and_goes_on(short, tmp_path):
    config = dataclasses.replace(short, failure_timeout=5.0)
    for _ in range(2):
        train(config, out=tmp_path / "run", resume=None, console=None)
    kinds = [event["kind"] for event in RunDirectory(tmp_path / "run").read_events()]
    assert [kind for kind in kinds if kind in ("start", "resume", "finish")] == ["start", "finish", "resume", "finish"]


def test_another_number_of_processes_is_told(short, tmp_path):
    train(short, out=tmp_path / "run", console=None)
    run = RunDirectory(tmp_path / "run")
    assert check_same_run(run, short, 1) == []
    assert check_same_run(run, short, 2) == ["the number of processes (1 → 2)"]


def test_a_folder_that_is_held_for_a_moment_is_waited_for(tmp_path):
    held, free = threading.Event(), threading.Event()

    def hold() -> None:
        with claimed(tmp_path / "run", resume=False):
            held.set()
            free.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(10)
    with pytest.raises(InputError, match="is writing to it"), claimed(tmp_path / "run", None, patience=0.2):
        pass
    threading.Timer(0.3, free.set).start()
    began = time.monotonic()
    with claimed(tmp_path / "run", None, patience=10):
        assert time.monotonic() - began > 0.2
    thread.join(10)
