"""Ranks that lose each other, for the tests: forked from one process that has imported torch, so that many cases are cheap.

python recovery.py CASE…   prints one JSON object, case → what each rank found (None: it was killed and said nothing).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from laneway.cluster.recover import LostContactError, Watch, another, rebuild

LIMIT = 2.0
PATIENT = timedelta(seconds=60)
Found = dict[str, Any]


class Stage:
    """What a case's ranks share: the store's port, and pipes for what they say."""

    def __init__(self, size: int) -> None:
        self.size, self.processes = size, dict[int, int]()
        self.said: dict[int, Found | None] = {}
        self.server: dist.TCPStore | None = None
        self.port = 0
        self._pipes: dict[int, int] = {}
        self._ready = os.pipe()

    def host(self) -> None:
        """Serve a store from the parent, as torchrun's agent does."""
        self.server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self.port = self.server.port

    def fork(self, rank: int, body: Callable[[int], Found]) -> None:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            try:
                found = body(rank)
            except BaseException:  # noqa: BLE001 - it is shown in the test
                found = {"crash": traceback.format_exc()}
            os.write(writing, json.dumps(found).encode())
            os._exit(0)
        os.close(writing)
        self.processes[rank], self._pipes[rank] = pid, reading

    def collect(self, seconds: float) -> dict[int, Found | None]:
        """What the ranks said within ``seconds``; those that still run are killed and show as {"hung": true}."""
        until = time.monotonic() + seconds
        hung: set[int] = set()
        for rank, pid in self.processes.items():
            while os.waitpid(pid, os.WNOHANG)[0] == 0:
                if time.monotonic() > until:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    hung.add(rank)
                    break
                time.sleep(0.01)
        for rank, pipe in self._pipes.items():
            with os.fdopen(pipe, "rb") as stream:
                text = stream.read()
            self.said[rank] = json.loads(text) if text else ({"hung": True} if rank in hung else None)
        return self.said

    def step(self) -> Callable[[], None]:
        """A collective to repeat; its first time tells the parent that this rank is there."""
        step, first = flat(), [True]

        def repeated() -> None:
            step()
            if first:
                first.clear()
                os.write(self._ready[1], b"x")

        return repeated

    def wait(self) -> None:
        """Until all ranks have done a collective."""
        for _ in range(self.size):
            os.read(self._ready[0], 1)
        time.sleep(0.2)

    def kill(self, rank: int, number: int = signal.SIGKILL) -> float:
        os.kill(self.processes[rank], number)
        return time.monotonic()


class Valve:
    """A relay to the store that can be shut without closing a connection, as a cut cable does.

    A process of its own: whoever forks must have no threads, as a lock that one of them holds is never free again in the child.
    """

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port, self.open, self.target = self.listener.getsockname()[1], True, 0
        reading, self.control = os.pipe()
        self.process = os.fork()
        if self.process == 0:
            self.target = int(os.read(reading, 16))
            threading.Thread(target=self._accept, daemon=True).start()
            os.read(reading, 1)
            self.open = False
            time.sleep(60)
            os._exit(0)

    def begin(self, target: int) -> None:
        os.write(self.control, f"{target}".encode())

    def shut(self) -> float:
        os.write(self.control, b"x")
        return time.monotonic()

    def end(self) -> None:
        os.kill(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)

    def _accept(self) -> None:
        while True:
            near, _ = self.listener.accept()
            far = socket.create_connection(("127.0.0.1", self.target))
            for a, b in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(a, b), daemon=True).start()

    def _pump(self, a: socket.socket, b: socket.socket) -> None:
        while (data := a.recv(65536)) and self.open:
            b.sendall(data)
        while not self.open:
            time.sleep(0.05)
        b.close()


def join(port: int, rank: int, size: int, limit: float = LIMIT, master: bool = False) -> tuple[Watch, dist.Store]:
    """A process group and a watch over one store."""
    store = dist.TCPStore("127.0.0.1", port, None, master, wait_for_workers=False)
    dist.init_process_group("gloo", store=dist.PrefixStore("group", store), rank=rank, world_size=size, timeout=PATIENT)
    return Watch(dist.PrefixStore("watch", another(store)), rank, size, limit=limit), store


def until_lost(watch: Watch, step: Callable[[], Any], seconds: float = 30.0) -> Found:
    """Run collectives until contact is lost."""
    until = time.monotonic() + seconds
    try:
        while time.monotonic() < until:
            watch.watched(step)
    except LostContactError as error:
        found = {"at": time.monotonic(), "kind": type(error).__name__, "text": str(error), "speaks": error.speaks}
        return found | {"lost": [member.rank for member in error.lost]}
    return {"kind": "nothing"}


def go_on(watch: Watch, value: float, **options: Any) -> Found:
    """Regroup and sum ``value`` over the new world."""
    try:
        size = rebuild(watch, patience=20, **options)
        total = torch.full((1000,), value)
        watch.watched(dist.all_reduce, total)
    except LostContactError as error:
        return {"regroup": type(error).__name__, "regroup_text": str(error)}
    return {"size": size, "rank": watch.rank, "total": total.unique().tolist(), "again": time.monotonic()}


def flat(numel: int = 200_000) -> Callable[[], None]:
    tensor = torch.ones(numel)

    def step() -> None:
        tensor.fill_(1.0)
        dist.all_reduce(tensor)

    return step


def lose(size: int, *ranks: int, how: int = signal.SIGKILL, again: int | None = None) -> Found:
    """``ranks`` are lost in a collective; the others regroup; then rank ``again`` of the new world too."""
    stage = Stage(size)
    stage.host()

    def body(rank: int) -> Found:
        watch, _ = join(stage.port, rank, size)
        found = until_lost(watch, stage.step())
        found |= go_on(watch, float(rank))
        if again is not None and "size" in found:
            if found["rank"] == again:
                os.kill(os.getpid(), how)
            found["second"] = until_lost(watch, flat()) | go_on(watch, float(rank))
        if "size" in found:
            watch.close()
        return found

    for rank in range(size):
        stage.fork(rank, body)
    stage.wait()
    when = [stage.kill(rank, how) for rank in ranks]
    if how == signal.SIGSTOP:
        time.sleep(LIMIT + 1.5)
        for rank in ranks:
            stage.kill(rank, signal.SIGCONT)
    return {"ranks": stage.collect(30), "when": when[0]}


def cut(size: int, far: tuple[int, ...]) -> Found:
    """The ranks in ``far`` can't reach the store any more, and no connection is closed."""
    stage, valve = Stage(size), Valve()
    stage.host()
    valve.begin(stage.port)

    def body(rank: int) -> Found:
        watch, _ = join(valve.port if rank in far else stage.port, rank, size)
        found = until_lost(watch, stage.step())
        found |= go_on(watch, float(rank))
        time.sleep(LIMIT if rank in far else 0)  # its process is there until the others have gone on
        return found

    for rank in range(size):
        stage.fork(rank, body)
    stage.wait()
    when = valve.shut()
    ranks = stage.collect(30)
    valve.end()
    return {"ranks": ranks, "when": when}


def store_host() -> Found:
    """Rank 0 serves the store, as without torchrun, and is killed."""
    stage = Stage(3)
    with socket.create_server(("127.0.0.1", 0)) as free:
        stage.port = free.getsockname()[1]

    def body(rank: int) -> Found:
        watch, _ = join(stage.port, rank, 3, master=rank == 0)
        return until_lost(watch, stage.step()) | go_on(watch, 1.0)

    for rank in range(3):
        stage.fork(rank, body)
    stage.wait()
    when = stage.kill(0)
    return {"ranks": stage.collect(30), "when": when}


def own_error() -> Found:
    """Rank 1 has an error of its own; nobody is lost."""
    stage = Stage(3)
    stage.host()

    def body(rank: int) -> Found:
        watch, _ = join(stage.port, rank, 3)
        try:
            with watch:
                for step in range(5):
                    if rank == 1 and step == 3:
                        raise ValueError("a number too many")
                    watch.watched(flat())
                until_lost(watch, flat())
                watch.check()
        except ValueError as error:
            return {"kind": "ValueError", "text": str(error)}
        except LostContactError as error:
            return {"kind": type(error).__name__, "text": str(error)} | go_on(watch, 1.0)
        return {"kind": "nothing"}

    for rank in range(3):
        stage.fork(rank, body)
    return {"ranks": stage.collect(30), "when": 0}


def quiet() -> Found:
    """Nothing happens for longer than the limit, with one rank that computes and holds the interpreter's lock at times."""
    stage = Stage(3)
    stage.host()

    def body(rank: int) -> Found:
        watch, _ = join(stage.port, rank, 3)
        until, count = time.monotonic() + 1.5 * LIMIT, 0
        while rank == 1 and time.monotonic() < until:
            count += sum(range(20_000_000 // 10)) > 0
        watch.watched(flat())
        watch.close()
        return {"kind": type(watch.failure).__name__}

    for rank in range(3):
        stage.fork(rank, body)
    return {"ranks": stage.collect(30), "when": 0}


CASES: dict[str, Callable[[], Found]] = {
    "kill": lambda: lose(4, 2),
    "kill_host": lambda: lose(6, 2, 3),
    "kill_first": lambda: lose(3, 0),
    "kill_twice": lambda: lose(4, 1, again=0),
    "freeze": lambda: lose(4, 1, how=signal.SIGSTOP),
    "cut": lambda: cut(5, (1, 3)),
    "minority": lambda: cut(5, (0, 1, 4)),
    "store_host": store_host,
    "own_error": own_error,
    "quiet": quiet,
}


def apart(case: Callable[[], Found]) -> Found:
    """The case in a process of its own, which began with one thread."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writing, json.dumps(case()).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        text = stream.read()
    os.waitpid(pid, 0)
    return json.loads(text)


def main() -> None:
    torch.set_num_threads(1)
    print(json.dumps({name: apart(CASES[name]) for name in sys.argv[1:]}))


if __name__ == "__main__":
    main()
