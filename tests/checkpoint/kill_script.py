"""Forks writers and kills them with SIGKILL while they save; after each kill the newest checkpoint must load.

``python kill_script.py calls FOLDER`` kills before the 1st, 2nd, 3rd, ... call that makes something durable or visible.
``python kill_script.py random FOLDER NUMBER SEED`` kills at random moments.
Prints one JSON object: how many kills, and how many of them came before the save was complete.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
import warnings
from pathlib import Path

import torch

from laneway.checkpoint import CheckpointStore
from laneway.rundir import RunDirectory

DURABLE = [(os, "fsync"), (os, "replace"), (os, "rename"), (os, "mkdir"), (os, "rmdir"), (os, "unlink"), (os, "open")]


def state(step: int) -> dict:
    return {"w": torch.full((20000,), float(step)), "cursor": {"step": step}}


def newest(run: RunDirectory) -> int:
    """Load the newest checkpoint and check that all of it is of one step."""
    store = CheckpointStore(run)
    loaded = {"w": torch.zeros(20000), "cursor": None}
    step = store.load_latest(loaded)
    assert (loaded["w"] == step).all(), step
    assert loaded["cursor"] == {"step": step}
    assert store.notices == [], store.notices
    return step


def kill_before(call: int) -> None:
    """Make the ``call``-th call of any of DURABLE in this process its last."""
    count = 0

    def last(function):
        def wrapped(*args, **kwargs):
            nonlocal count
            count += 1
            if count == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return wrapped

    for module, name in DURABLE:
        setattr(module, name, last(getattr(module, name)))


def forked(action) -> int:
    """Run ``action`` in a fork; returns its pid."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
            os._exit(0)
        finally:
            os._exit(1)
    return pid


def killed(pid: int) -> bool:
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, status
    return os.WIFSIGNALED(status)


def at_calls(folder: Path) -> dict:
    """Steps 1, 2 saved; kill a save of step 3 (which retires step 1), and one of step 2 again, before each call."""
    before = kills = 0
    start = RunDirectory(folder / "start")
    start.path.mkdir(parents=True)
    for step in (1, 2):
        CheckpointStore(start, keep=2).save(step, state(step))
    for step in (3, 2):
        for call in range(1, 1000):
            run = RunDirectory(folder / f"{step}_{call}")
            shutil.copytree(start.path, run.path)

            def write(run=run, call=call, step=step):
                kill_before(call)
                CheckpointStore(run, keep=2).save(step, state(step))

            if not killed(forked(write)):
                break
            kills += 1
            found = newest(run)
            assert found in (2, 3), found
            before += found == 2
            assert run.latest.read_text().strip() in ("step_00000002", "step_00000003")
            CheckpointStore(run, keep=2).save(4, state(4))
            assert newest(run) == 4
            assert not [path for path in run.checkpoints.iterdir() if path.name.startswith(".")]
            assert len(CheckpointStore(run).steps()) == 2
            shutil.rmtree(run.path)
        else:
            raise AssertionError("the save never completed")
    return {"kills": kills, "before": before}


def at_random(folder: Path, number: int, seed: int) -> dict:
    """One run, saved to again and again by writers that are killed."""
    run = RunDirectory(folder / "run")
    run.path.mkdir(parents=True)
    CheckpointStore(run).save(0, state(0))
    begin = time.monotonic()
    CheckpointStore(run).save(0, state(0))
    some = 10 * (time.monotonic() - begin)  # ten saves, however busy the machine is
    rng, before = random.Random(seed), 0
    for _ in range(number):
        first = newest(run) + 1

        def write(first=first):
            store = CheckpointStore(run)
            for step in range(first, first + 1000):
                store.save(step, state(step))

        pid = forked(write)
        time.sleep(rng.uniform(0, some))
        os.kill(pid, signal.SIGKILL)
        assert killed(pid)
        unfinished = any(path.name.startswith(".tmp_step") for path in run.checkpoints.iterdir())
        before += unfinished
        assert newest(run) >= first - 1
    return {"kills": number, "before": before, "step": newest(run)}


if __name__ == "__main__":
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    target = Path(sys.argv[2])
    result = at_calls(target) if sys.argv[1] == "calls" else at_random(target, int(sys.argv[3]), int(sys.argv[4]))
    print(json.dumps(result))
