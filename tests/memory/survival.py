"""Run by test_survive: the counting allocator and limits are there for the whole process, so every case has one of its own.

python survival.py CASE[,ARGUMENT…] …; prints one JSON object: what each case found, in processes forked after the imports.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import json
import os
import resource
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from laneway.core import LanewayError
from laneway.memory.config import MemoryConfig
from laneway.memory.counting import CountingAllocator
from laneway.memory.disk import DiskTier
from laneway.memory.manager import MemoryManager
from laneway.memory.meter import CountingMeter
from laneway.memory.oom import out_of_memory
from laneway.memory.survive import Survivor
from laneway.memory.tier import Ended, Slot, Tier, TierFullError, Transfer

CPU = torch.device("cpu")


class Moment(Transfer):
    """The data has moved; its end is noticed at the next poll or wait."""

    def __init__(self, tier: FileTier, nbytes: int, ended: Ended) -> None:
        self.tier, self.nbytes = tier, nbytes
        tier.ended.append((self, ended))
        self.noticed = False

    @property
    def done(self) -> bool:
        return self.noticed

    def wait(self) -> float:
        self.tier.poll()
        return 0.0

    def cancel(self) -> bool:
        return False


class FileTier(Tier):
    """A file, written and read at once; whoever asked hears of the end at the next poll."""

    def __init__(self, capacity: int) -> None:
        super().__init__("file", capacity)
        self.file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 (closed by close)
        self.ended: list[tuple[Moment, Ended]] = []
        self.end = 0

    def allocate(self, nbytes: int) -> Slot:
        if self.used + nbytes > self.capacity:
            raise TierFullError("full")
        self._took(nbytes)
        self.end += nbytes
        return Slot(self.end - nbytes, nbytes)

    def release(self, slot: Slot) -> None:
        self.used -= slot.nbytes

    def write(self, slot: Slot, source: torch.UntypedStorage, ended: Ended) -> Transfer:
        os.pwrite(self.file.fileno(), (ctypes.c_char * slot.nbytes).from_address(source.data_ptr()), slot.offset)
        self.traffic.bytes_written += slot.nbytes
        return Moment(self, slot.nbytes, ended)

    def read(self, slot: Slot, target: torch.UntypedStorage, ended: Ended, *, urgent: bool = False) -> Transfer:
        os.preadv(self.file.fileno(), [(ctypes.c_char * slot.nbytes).from_address(target.data_ptr())], slot.offset)
        self.traffic.bytes_read += slot.nbytes
        return Moment(self, slot.nbytes, ended)

    def poll(self) -> None:
        while self.ended:
            moment, ended = self.ended.pop(0)
            moment.noticed = True
            ended(None)

    def bandwidth(self) -> tuple[float, float]:
        return 1e9, 1e9

    def close(self) -> None:
        self.file.close()


class Net(nn.Module):
    """A tied embedding, batch normalisation, dropout, a buffer that is replaced, one that never changes."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.up, self.norm, self.down = nn.Linear(width, 3 * width), nn.BatchNorm1d(3 * width), nn.Linear(3 * width, width)
        self.drop = nn.Dropout(0.3)
        self.register_buffer("table", torch.linspace(0, 1, width))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, tokens_bt: Tensor) -> Tensor:
        x = self.embedding(tokens_bt) + self.table
        self.calls = self.calls + 1
        h = self.norm(self.up(x).transpose(1, 2)).transpose(1, 2)
        x = x + self.drop(self.down(F.gelu(h)))
        return F.linear(x * torch.rand_like(x), self.embedding.weight)


class Run:
    """A model and an optimizer from a fixed start."""

    def __init__(self, width: int = 16, **adamw: Any) -> None:
        torch.manual_seed(3)
        self.model = Net(width)
        self.generator = torch.Generator().manual_seed(5)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, **adamw)
        self.tokens = torch.randint(0, 11, (4, 6))

    def micro(self, tokens: Tensor) -> Tensor:
        noise = torch.rand((), generator=self.generator)
        loss = F.cross_entropy(self.model(tokens).flatten(0, 1), tokens.flatten()) * (1 + noise) / 2
        loss.backward()
        return loss.detach()

    def step(self, survivor: Survivor, before_update: Callable[[], None] = lambda: None) -> None:
        for tokens in self.tokens.split(2):
            survivor.attempt(lambda tokens=tokens: self.micro(tokens))
        gradients = [p.grad for p in self.model.parameters()]
        norm = survivor.repeat(lambda: get_total_norm(gradients))
        survivor.repeat(lambda: clip_grads_with_norm_(self.model.parameters(), 0.1, norm))
        before_update()
        survivor.step(self.optimizer)
        self.optimizer.zero_grad(set_to_none=True)

    def state(self) -> list[Tensor]:
        """All that must come out the same."""
        found = [torch.get_rng_state(), self.generator.get_state(), *self.model.state_dict().values()]
        for held in self.optimizer.state.values():
            found += held.values()
        return [tensor.clone() for tensor in found]


def survivor_of(run: Run, manager: MemoryManager | None = None, op_retry: str = "never") -> Survivor:
    return Survivor(manager, run.model, device=CPU, generators=[run.generator], op_retry=op_retry)


@contextmanager
def managed(run: Run, tier: FileTier, room: int | None) -> Iterator[MemoryManager | None]:
    """A manager with a budget of ``room`` bytes more than there are now; None: none."""
    if room is None:
        yield None
        return
    allocator = CountingAllocator.install()
    config = MemoryConfig(budget=str(allocator.live + room), min_bytes=512)
    manager = MemoryManager(run.model, config, tier, CountingMeter(allocator), CPU)
    with manager:
        yield manager


def every_allocation(
    op_retry: str = "never", min_bytes: int = 1, room: int | None = None, update_of: int = 0, **adamw: Any
) -> dict[str, Any]:
    """Fail at each allocation of a first step, one a run; ``update_of``: of the optimizer alone in the step of that number."""
    allocator = CountingAllocator.install()
    want: list[Tensor] = []
    wrong: list[Any] = []
    kinds: set[str] = set()
    moved, at, left = 0, 0, 0
    while not left:
        run, tier = Run(**adamw), FileTier(1 << 30)
        with managed(run, tier, room) as manager:
            survivor = survivor_of(run, manager, op_retry)
            for _ in range(update_of - 1):
                run.step(survivor)
            if update_of:
                run.step(survivor, functools.partial(allocator.fail_at, at, min_bytes))
            else:
                allocator.fail_at(at, min_bytes)
                run.step(survivor)
            left = allocator.fails_in
            allocator.fail_at(0)
        found = run.state()
        want = want or found
        kinds.update(survivor.counts)
        moved += tier.traffic.bytes_written
        if len(found) != len(want) or not all(torch.equal(a, b) for a, b in zip(found, want, strict=True)):
            wrong.append(at)
        if room is None and bool(survivor.events) != (at > 0 and not left):
            wrong.append(f"{at}: {survivor.events}")
        if tier.used or (manager is not None and manager.activations.alive):
            wrong.append(f"{at}: {tier.used} bytes left in the tier")
        tier.close()
        at += 1
    return {"tried": at - 2, "wrong": wrong, "kinds": sorted(kinds), "moved": moved}


ALL: dict[str, dict[str, Any]] = {
    "replayed": {"min_bytes": 64},
    "retried": {"op_retry": "always", "min_bytes": 64},
    "managed": {"room": 20_000, "min_bytes": 1024},
    "managed-retried": {"room": 20_000, "min_bytes": 1024, "op_retry": "always"},
    "first-update-foreach": {"update_of": 1, "foreach": True},
    "second-update": {"update_of": 2},
    "second-update-foreach": {"update_of": 2, "foreach": True, "amsgrad": True},
    "second-update-fused": {"update_of": 2, "fused": True},
}


def split() -> dict[str, Any]:
    """A device that has room for a quarter of the micro-batch; then one that has room for nothing."""
    allocator = CountingAllocator.install()
    tall = Tall(layers=2)
    rows = torch.randn(16, 256, 128)
    survivor = Survivor(None, tall.model, device=CPU, split=True)
    want = tall.micro(rows)
    gradients = [p.grad.clone() for p in tall.model.parameters()]
    tall.model.zero_grad()
    allocator.reset_peak()
    tall.micro(rows[:5])
    allocator.limit(allocator.peak)
    tall.model.zero_grad()

    def parts(count: int) -> list[Callable[[], Tensor]]:
        return [functools.partial(tall.micro, piece, 1 / count) for piece in rows.chunk(count)]

    got = [survivor.attempt(lambda: tall.micro(rows), parts=parts) for _ in range(2)]
    kinds = [event.kind for event in survivor.events]
    worst = max(
        float((p.grad / 2 - g).abs().max() / g.abs().max()) for p, g in zip(tall.model.parameters(), gradients, strict=True)
    )
    off = max(abs(float(value - want)) for value in got)
    before = [p.grad.clone() for p in tall.model.parameters()], torch.get_rng_state()
    allocator.limit(allocator.live + 100_000)
    try:
        survivor.attempt(lambda: tall.micro(rows), parts=lambda count: parts(min(count, 8)))
        said = ""
    except LanewayError as error:
        said = str(error)
    allocator.limit(None)
    kept = all(torch.equal(p.grad, g) for p, g in zip(tall.model.parameters(), before[0], strict=True))
    return {
        "kinds": kinds,
        "gradients": worst,
        "loss": off,
        "said": said,
        "kept": kept and torch.equal(before[1], torch.get_rng_state()),
    }


def parked() -> dict[str, Any]:
    """Gradients of earlier micro-batches leave the device for the second try, and come back to be added."""
    allocator, tier = CountingAllocator.install(), FileTier(1 << 30)
    tall, rows = Tall(layers=2), torch.randn(4, 8, 128)
    for piece in rows:
        tall.micro(piece)
    want = [p.grad.clone() for p in tall.model.parameters()]
    tall.model.zero_grad()
    live: list[int] = []
    config = MemoryConfig(budget="1GiB")
    with MemoryManager(tall.model, config, tier, CountingMeter(allocator), CPU) as manager:
        survivor = Survivor(manager, tall.model, device=CPU)

        def run(piece: Tensor) -> Tensor:
            live.append(allocator.live)
            return tall.micro(piece)

        for at, piece in enumerate(rows):
            if at == 2:
                allocator.fail_at(30)
            survivor.attempt(lambda piece=piece: run(piece))
    tier.close()
    return {
        "tries": len(live),
        "freed": live[2] - live[3],
        "gradients": sum(p.numel() * 4 for p in tall.model.parameters() if p.numel() * 4 >= 64 << 10),
        "equal": all(torch.equal(p.grad, g) for p, g in zip(tall.model.parameters(), want, strict=True)),
        "left": tier.used,
        "moved": [tier.traffic.bytes_written, tier.traffic.bytes_read],
    }


class Tall:
    """A plain stack that saves 10 KiB a row."""

    def __init__(self, layers: int = 8, width: int = 128) -> None:
        torch.manual_seed(1)
        blocks = [nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(layers)]
        self.model = nn.Sequential(*blocks)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)

    def micro(self, x: Tensor, weight: float = 1.0) -> Tensor:
        loss = (self.model(x) ** 2).mean() * weight
        loss.backward()
        return loss.detach()

    def train(self, survivor: Survivor | None, rows: int, steps: int) -> list[float]:
        draw, losses = torch.Generator().manual_seed(7), []
        for _ in range(steps):
            x = torch.randn(rows, 128, generator=draw)
            if survivor is None:
                losses.append(self.micro(x).item())
                self.optimizer.step()
            else:
                losses.append(survivor.attempt(lambda x=x: self.micro(x)).item())
                survivor.step(self.optimizer)
            self.optimizer.zero_grad()
        return losses


def limited(how: str, by: str, room_mib: int) -> dict[str, Any]:
    """A few steps in a process whose memory the system limits to ``room_mib`` more than it has.

    Args:
        how: ``plain``, ``managed`` (with a file below the manager, whose budget is half the room), or ``overbooked`` (its budget
            is more than there is).
        by: ``rlimit`` (address space), ``cgroup`` (the folder of a control group that this may write to), or ``nothing``.
    """
    tall = Tall()
    room, survivor = room_mib << 20, None
    tier = DiskTier(tempfile.gettempdir(), 256 << 20)
    with ExitStack() as stack:
        stack.callback(tier.close)
        if how != "plain":
            allocator = CountingAllocator.install()
            tall.train(None, 16, 1)
            budget = allocator.live + (room // 2 if how == "managed" else room + room // 4)
            config = MemoryConfig(budget=str(budget))
            manager = stack.enter_context(MemoryManager(tall.model, config, tier, CountingMeter(allocator), CPU))
            survivor = Survivor(manager, tall.model, device=CPU, attempts=8)
        else:
            tall.train(None, 16, 1)
        if by == "rlimit":
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + room, used + room))
        elif by != "nothing":
            confine(Path(by), room)
        losses = tall.train(survivor, 2048, 3)
    counts = {} if survivor is None else dict(survivor.counts)
    return {"losses": losses, "moved": tier.traffic.bytes_written, "counts": counts}


def confine(group: Path, room: int) -> None:
    """Enter a control group (version 1 or 2) and limit it to what is charged to it then, and ``room``.

    What the process has already stays charged to the group it comes from.
    """
    (group / "cgroup.procs").write_text(str(os.getpid()))
    charged = next(group / name for name in ("memory.current", "memory.usage_in_bytes") if (group / name).exists())
    limit = int(charged.read_text()) + room
    for name, value in {"memory.max": limit, "memory.swap.max": 0, "memory.limit_in_bytes": limit}.items():
        if (group / name).exists():
            (group / name).write_text(str(value))


CASES: dict[str, Callable[..., dict[str, Any]]] = {
    "smallest": every_allocation,
    **{name: functools.partial(every_allocation, **given) for name, given in ALL.items()},
    "split": split,
    "parked": parked,
    "limited": limited,
}


def child(case: str) -> dict[str, Any]:
    """Run a case in a process of its own; what it found, or how it ended."""
    sys.stdout.flush()
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(receive)
        try:
            name, *arguments = case.split(",")
            found = CASES[name](*(int(given) if given.isdigit() else given for given in arguments))
        except Exception as error:  # noqa: BLE001 (whatever it is, the parent must hear of it)
            found = {"error": f"{type(error).__name__}: {error}", "oom": out_of_memory(error)}
        with os.fdopen(send, "w") as pipe:
            json.dump(found, pipe)
        os._exit(0)
    os.close(send)
    with os.fdopen(receive) as pipe:
        said = pipe.read()
    _, status = os.waitpid(pid, 0)
    return json.loads(said) if said else {"signal": os.WTERMSIG(status)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for optimizer in (torch.optim.AdamW, torch.optim.SGD):  # imports what optimizers import late
        optimizer([torch.zeros(1, requires_grad=True)], lr=1.0)
    gc.freeze()  # what was imported need not be looked through at every recovery
    print(json.dumps({case: child(case) for case in sys.argv[1:]}))
