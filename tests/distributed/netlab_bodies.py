"""What ranks do in the lab's own tests."""

from __future__ import annotations

import fcntl
import os
import socket
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from laneway.bench.netlab import Context, LabError


def where(context: Context) -> tuple:
    """This rank's place as the context, the environment and the system say it."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    place = (context.rack, context.host, context.local)
    return context.rank, place, socket.gethostname(), tuple(int(os.environ[name]) for name in names), torch.rand(1).item()


def transfer(
    context: Context, source: int, target: int, numbers: int, mbit: float = 0.0, after: float = 0.0, link: str = ""
) -> list:
    """Send from one rank to another; with ``mbit`` the rate changes ``after`` seconds from the start."""
    context.start_gloo()
    x = torch.randn(numbers, generator=torch.Generator().manual_seed(context.rank))

    def go(part: torch.Tensor = x) -> None:
        if context.rank == source:
            dist.send(part, target)
        elif context.rank == target:
            dist.recv(part, source)

    go(x[:8])
    if mbit and context.rank == source:
        threading.Timer(after, context.set_rate, (link, mbit)).start()
    timed = context.timed(go)
    return [timed.seconds, timed.nbytes, x.double().sum().item()]


def all_reduce(context: Context, numbers: int) -> list:
    """A flat all-reduce: its bytes and the largest error."""
    context.start_gloo()
    drawn = [torch.randn(numbers, generator=torch.Generator().manual_seed(rank)) for rank in range(context.world)]
    exact = torch.stack(drawn).double().sum(0)
    x = drawn[context.rank]
    dist.all_reduce(x)
    error = (x.double() - exact).abs().max().item()
    return [context.timed(lambda: dist.all_reduce(x)).nbytes, error]


def quiet(context: Context) -> dict[str, int]:
    """What the lab's own coordination puts on the links."""
    context.barrier()
    before = context.counters()
    for round in range(50):
        assert context.gather((context.rank, round)) == [(rank, round) for rank in range(context.world)]
    return {link: count - before[link] for link, count in context.counters().items()}


def raises(context: Context) -> str:
    """Rank 1 fails, others would wait for it."""
    if context.rank == 1:
        print("before the end")
        raise ValueError("rank one can't go on")
    time.sleep(60)
    return "never"


def hangs(context: Context) -> None:
    """Waits for ever where the last rank does."""
    if context.rank == context.world - 1:
        threading.Event().wait()


def dies(context: Context, victim: int, how: str) -> str:
    """What a rank sees when another one is killed, hangs, or can't be reached."""
    context.start_gloo(seconds=1.0)
    x = torch.ones(1 << 18)
    dist.all_reduce(x)
    context.barrier()
    if context.rank == 0:
        rack, host = context.positions[victim]
        act = {"kill": context.kill, "stop": context.stop}.get(how)
        threading.Timer(0.2, act or context.set_link, (victim,) if act else (f"r{rack}h{host}", False)).start()
    end = time.monotonic() + 20
    try:
        while time.monotonic() < end:
            dist.all_reduce(x)
    except RuntimeError as error:
        return str(error)
    return "nothing"


def meets_the_dead(context: Context) -> str:
    """A barrier with a rank that has ended fails at once; the others have theirs."""
    if context.rank == 0:
        context.kill(1)
        try:
            context.barrier()
        except LabError as error:
            context.barrier(ranks=[0, 2, 3])
            return str(error)
    elif context.rank == 1:
        time.sleep(60)
    else:
        context.barrier(ranks=[0, 2, 3])
    return ""


def freezes(context: Context) -> list[bool]:
    """A rank that is stopped does nothing until it is resumed."""
    beats: list[float] = []
    if context.rank == 1:
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            beats.append(time.monotonic())
            time.sleep(0.005)
    else:
        time.sleep(0.3)
        stopped = context.stop(1)
        time.sleep(0.6)
        resumed = context.resume(1)
        beats = [stopped, resumed]
    told = context.gather(beats)
    stopped, resumed = told[0]
    return [any(stopped + 0.05 < beat < resumed - 0.05 for beat in told[1]), any(beat > resumed for beat in told[1])]


def holds(context: Context, folder: str) -> None:
    """Hold a lock and hang: what is still there when the runner is killed holds it."""
    with open(Path(folder, f"lock{context.rank}"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        context.barrier()
        Path(folder, f"ready{context.rank}").touch()
        time.sleep(300)
