"""Runs of `laneway train` on two ranks that are started again when one is lost: what torchrun's agent does, with less to load.

python restarts.py CONFIG.toml CASE…   prints one JSON object: case → one entry for each start, with exit codes and what was said.
As an agent does, it serves one store for all starts.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # DDP loads it; once here is cheaper than in each rank
import torch.distributed as dist
import torch.distributed.checkpoint

from laneway.cli import main as laneway
from laneway.rundir import RunDirectory

RANKS = 2
LIMIT = 60.0
KILL_AT = 12
Start = dict[str, Any]


class Agent:
    """Starts all ranks together and ends the others when one ends badly."""

    def __init__(self, command: list[str], name: str) -> None:
        self.command, self.name = command, name
        self.store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self.said: list[Path] = []

    def start(self) -> dict[int, int]:
        self.said = [Path(f"{self.name}.{time.monotonic_ns()}.{rank}.log") for rank in range(RANKS)]
        return {rank: self._fork(rank) for rank in range(RANKS)}

    def _fork(self, rank: int) -> int:
        pid = os.fork()
        if pid:
            return pid
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "MASTER_PORT": self.store.port}
        os.environ |= {name: str(value) for name, value in place.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
        log = os.open(self.said[rank], os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        code = 99
        try:
            code = laneway(self.command)
        except BaseException:  # noqa: BLE001 - it is shown in the test
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def wait(self, processes: dict[int, int]) -> Start:
        """Exit codes (negative: the signal); as torchrun, ends what is left a while after one ended badly."""
        codes: dict[int, int] = {}
        until = time.monotonic() + LIMIT
        while len(codes) < len(processes):
            for rank, pid in processes.items():
                if rank in codes:
                    continue
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[rank] = os.waitstatus_to_exitcode(status)
                    if codes[rank] != 0:
                        until = min(until, time.monotonic() + 10)
            if time.monotonic() > until:
                for rank, pid in processes.items():
                    if rank not in codes:
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        return {"codes": [codes[rank] for rank in sorted(codes)], "said": [path.read_text() for path in self.said]}


def trained(run: RunDirectory) -> int:
    with contextlib.suppress(OSError):
        return len(run.metrics().read_text().splitlines())
    return 0


def run(config: str, name: str, disturb: Callable[[dict[int, int]], None] | None = None, *flags: str) -> list[Start]:
    """Start until all ranks end well, at most three times; ``disturb`` the first start at step ``KILL_AT``."""
    agent = Agent(["train", "--config", config, "--out", name, "--resume-or-start", *flags], name)
    starts: list[Start] = []
    while len(starts) < 3 and not (starts and set(starts[-1]["codes"]) == {0}):
        processes = agent.start()
        if disturb is not None and not starts:
            until = time.monotonic() + LIMIT
            while trained(RunDirectory(Path(name))) < KILL_AT and time.monotonic() < until:
                time.sleep(0.002)
            disturb(processes)
        starts.append(agent.wait(processes))
    return starts


def send(number: int, rank: int) -> Callable[[dict[int, int]], None]:
    return lambda processes: os.kill(processes[rank], number)


CASES: dict[str, Callable[[str], list[Start]]] = {
    "undisturbed": lambda config: run(config, "undisturbed"),
    "killed": lambda config: run(config, "killed", send(signal.SIGKILL, 1)),
    "killed_first": lambda config: run(config, "killed_first", send(signal.SIGKILL, 0)),
    "frozen": lambda config: run(config, "frozen", send(signal.SIGSTOP, 1)),
    "sharded_undisturbed": lambda config: run(config, "sharded_undisturbed", None, "--parallel", "fsdp"),
    "sharded_killed": lambda config: run(config, "sharded_killed", send(signal.SIGKILL, 0), "--parallel", "fsdp"),
}


def main() -> None:
    torch.set_num_threads(1)
    said = {name: CASES[name](sys.argv[1]) for name in sys.argv[2:]}
    print(json.dumps(said))


if __name__ == "__main__":
    main()
