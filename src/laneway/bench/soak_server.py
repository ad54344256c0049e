"""Runs the jobs of a soak, one after the other: ``python -m laneway.bench.soak_server FOLDER MOUNT``.

    stdin: one job a line, as JSON      stdout: what came of it, one line a job

This process has imported everything and computes nothing, so that a worker is a fork of it and is there at once. It is the
supervisor too, the same for every variant: it starts a worker; where that ends before the run does, it starts the next one, which
goes on from the newest checkpoint. Between two it does what an operator would: frees a full disk, sets a checkpoint aside that a
process could not load, and gives a step whose batch ended a process (no memory, NaN) its usual batch.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from laneway.bench.soak_schedule import Fault, Job, Progress
from laneway.bench.soak_worker import RUN, TIER, free_disk, work
from laneway.checkpoint import CheckpointStore
from laneway.core import LanewayError
from laneway.rundir import RunDirectory

DISK = "512m"
LONGEST = 300  # seconds of a worker, then SIGALRM
ONCE = ("kill", "disk", "corrupt")


def main(folder: str, mount: str) -> None:
    """Serve until stdin ends; ``mount``: ``yes`` gives the jobs a file system of their own, in ``FOLDER/disk``."""
    disk = Path(folder) / "disk"
    disk.mkdir()
    if mount == "yes":
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(disk)], check=True)
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])  # torch imports much when it makes its first optimizer
    gc.freeze()
    for line in sys.stdin:
        job = Job.of(json.loads(line))
        shutil.rmtree(job.folder, ignore_errors=True)
        (Path(job.folder) / TIER).mkdir(parents=True)
        processes = supervise(job, mount == "yes")
        processes[-1]["events"] = _events(Path(job.folder))
        shutil.rmtree(job.folder)
        print(json.dumps(processes), flush=True)


def supervise(job: Job, real_disk: bool) -> list[dict[str, Any]]:
    """Processes of one run, from the first to the one that finished it, or to the most that there may be."""
    progress = Progress(pending=[fault for fault in job.faults if fault.kind in ONCE])
    found: list[dict[str, Any]] = []
    while len(found) < most_processes(job):
        found.append(process := _process(job, progress, real_disk))
        if process["cause"] == "finished":
            break
        free_disk(Path(job.folder))
        _attend(job, progress, process)
    return found


def most_processes(job: Job) -> int:
    """Twice as many as there are faults, and a few."""
    return 2 * len(job.faults) + 3


def _attend(job: Job, progress: Progress, process: dict[str, Any]) -> None:
    """What is done between the end of a process and the start of the next."""
    if process["cause"] == "corrupt":
        _set_aside(Path(job.folder))
    elif process["cause"] in ("spike", "nan"):
        progress.replaced.append(process["begun"])
    happened = [fault for fault in progress.pending if fault.step in process["fired"]]
    for fault in happened:
        progress.pending.remove(fault)
        if fault.kind == "corrupt":
            damage(Path(job.folder), job.seed, fault)
            process["cause"] = "corrupt"
        elif fault.kind == "kill":
            process["cause"] = "kill"


def _events(folder: Path) -> dict[str, int]:
    """How many events of each kind the run wrote down."""
    return Counter(event["kind"] for event in RunDirectory(folder / RUN).read_events())


def damage(folder: Path, seed: int, fault: Fault) -> None:
    """Change bytes of the largest file of the newest checkpoint, or cut it; nothing where there is no checkpoint."""
    store = CheckpointStore(RunDirectory(folder / RUN))
    steps = store.steps()
    if not steps:
        return
    chance = random.Random(f"soak {seed} damage {fault.step}")
    path = max(store.folder(steps[-1]).iterdir(), key=lambda path: path.stat().st_size)
    size = path.stat().st_size
    if chance.random() < 0.5:
        os.truncate(path, size // 2)
        return
    at = chance.randrange(size - 64)
    with path.open("r+b") as file:
        file.seek(at)
        changed = bytes(byte ^ 0xFF for byte in file.read(64))
        file.seek(at)
        file.write(changed)


def _set_aside(folder: Path) -> None:
    store = CheckpointStore(RunDirectory(folder / RUN))
    for step in store.steps()[-1:]:
        shutil.rmtree(store.folder(step))


def _process(job: Job, progress: Progress, real_disk: bool) -> dict[str, Any]:
    """One worker, waited for: the steps it began and did, and how it ended."""
    receive, send = os.pipe()
    worker = os.fork()
    if worker == 0:
        os.close(receive)
        os._exit(_child(job, progress, real_disk, send))
    os.close(send)
    with os.fdopen(receive) as pipe:
        told = [json.loads(line) for line in pipe]
    _, status = os.waitpid(worker, 0)
    end = next((line for line in told if "cause" in line), {"cause": _signal(status)})
    return {
        **end,
        "begun": max((line["begin"] for line in told if "begin" in line), default=None),
        "done": [line for line in told if "done" in line],
        "fired": [line["fired"] for line in told if "fired" in line],
    }


def _child(job: Job, progress: Progress, real_disk: bool, send: int) -> int:
    """The worker's side: its own output is dropped, what it tells goes through the pipe a line at a time."""
    signal.alarm(LONGEST)
    silent = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):
        os.dup2(silent, number)
    try:
        return work(job, progress, real_disk, lambda line: _send(send, line))
    except BaseException:  # noqa: BLE001  never back into the supervisor's code
        traceback.print_exc()
        return 1


def _send(pipe: int, line: dict[str, Any]) -> None:
    os.write(pipe, json.dumps(line).encode() + b"\n")


def _signal(status: int) -> str:
    return signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"exit {os.WEXITSTATUS(status)}"


class Server:
    """The other side: starts the process, gives it jobs.

    Args:
        folder: an empty folder for the jobs.

    Attributes:
        real_disk: whether the jobs have a file system of their own.
    """

    def __init__(self, folder: Path) -> None:
        prefix = _own_mounts(folder)
        self.folder, self.real_disk = folder / "disk" / "job", prefix is not None
        command = [*(prefix or []), sys.executable, "-m", __name__, str(folder), "yes" if self.real_disk else "no"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self.errors = (folder / "errors").open("w+b")
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, env=environment, text=True
        )

    def run(self, job: Job) -> list[dict[str, Any]]:
        """The processes of one run. Raises LanewayError where the server ended."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(dataclasses.asdict(job)) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self.errors.seek(0)
            said = self.errors.read().decode(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
            raise LanewayError(f"soak: the supervising process ended: {said[0]}")
        return json.loads(line)

    def close(self) -> None:
        """End it, and with it its file system."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(LONGEST)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self.errors.close()


def _own_mounts(folder: Path) -> list[str] | None:
    """How to start a process that may mount a file system which goes when it goes; None: not here."""
    unshare = shutil.which("unshare")
    if unshare is None or shutil.which("mount") is None:
        return None
    prefix = [unshare, "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"]), "--"]
    trial = folder / "trial"
    trial.mkdir()
    tried = subprocess.run(
        [*prefix, "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(trial)], capture_output=True, check=False
    )
    trial.rmdir()
    return None if tried.returncode else prefix


if __name__ == "__main__":
    main(*sys.argv[1:])
