"""Run by test_survive: the counting allocator is there for the whole process, so every case has one of its own.

python survival.py CASE ARGUMENTS; prints one JSON object.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from laneway.memory.config import MemoryConfig
from laneway.memory.counting import CountingAllocator
from laneway.memory.manager import MemoryManager
from laneway.memory.meter import CountingMeter
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
        self.file = tempfile.TemporaryFile(buffering=0)
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
        if bool(survivor.events) != (at > 0 and not left):
            wrong.append(f"{at}: {survivor.events}")
        if tier.used or (manager is not None and manager.activations.alive):
            wrong.append(f"{at}: {tier.used} bytes left in the tier")
        tier.close()
        at += 1
    return {"tried": at - 2, "wrong": wrong, "kinds": sorted(kinds), "moved": moved}


ALL = {
    "replayed": {},
    "retried": {"op_retry": "always"},
    "managed": {"room": 20_000, "min_bytes": 512},
    "managed-retried": {"room": 20_000, "min_bytes": 512, "op_retry": "always"},
    "first-update-foreach": {"update_of": 1, "foreach": True},
    "second-update": {"update_of": 2},
    "second-update-foreach": {"update_of": 2, "foreach": True, "amsgrad": True},
    "second-update-fused": {"update_of": 2, "fused": True},
}


def everywhere() -> dict[str, Any]:
    """Every way of failing, one after the other: importing torch takes longer than any of them."""
    return {name: every_allocation(**given) for name, given in ALL.items()}


CASES: dict[str, Callable[..., dict[str, Any]]] = {"everywhere": everywhere}

if __name__ == "__main__":
    torch.set_num_threads(1)
    warm = Run()
    warm.step(survivor_of(warm, None, "always"))
    gc.freeze()  # what was imported need not be looked through at every recovery
    print(json.dumps(CASES[sys.argv[1]](*sys.argv[2:])))
