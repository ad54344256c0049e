"""Run by torchrun on two ranks: rank 1 runs out of memory at one allocation after the other, rank 0 never.

torchrun --nproc-per-node 2 survival.py FOLDER; leaves what it found in FOLDER/rank*.json.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from laneway.core import LanewayError
from laneway.memory.counting import CountingAllocator
from laneway.memory.reduce import Agreement, reduce_gradients
from laneway.memory.survive import Survivor

CPU = torch.device("cpu")


class Net(nn.Module):
    """Dropout, batch normalisation, a tied embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.mix = nn.Embedding(11, 16), nn.BatchNorm1d(16), nn.Linear(16, 16)

    def forward(self, tokens_bt: Tensor) -> Tensor:
        x = self.norm(self.embedding(tokens_bt).transpose(1, 2)).transpose(1, 2)
        return F.linear(F.dropout(self.mix(x).tanh(), 0.2), self.embedding.weight)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()) / 2


class Run:
    """Two steps of two micro-batches on this rank's tokens."""

    def __init__(self, wrapped: bool = True) -> None:
        torch.manual_seed(3)
        self.model = Net()
        self.call: nn.Module = self.model
        if wrapped:
            self.call = DistributedDataParallel(self.model, forward_sync_buffers=False)
        torch.manual_seed(4 + dist.get_rank())
        self.tokens = torch.randint(0, 11, (4, 5))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, foreach=True)

    def micro(self, tokens: Tensor) -> Tensor:
        loss = loss_of(self.call, tokens)
        loss.backward()
        return loss.detach()

    def survive(self, survivor: Survivor) -> None:
        for _ in range(2):
            for tokens in self.tokens.split(2):
                survivor.attempt(lambda tokens=tokens: self.micro(tokens))
            reduce_gradients(self.model)
            survivor.step(self.optimizer)
            self.optimizer.zero_grad()

    def plain(self) -> list[Tensor]:
        """As DDP does it."""
        first, second = self.tokens.split(2)
        for _ in range(2):
            with self.call.no_sync():
                self.micro(first)
            self.micro(second)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self.state()

    def state(self) -> list[Tensor]:
        found = [torch.get_rng_state(), *self.model.state_dict().values()]
        for held in self.optimizer.state.values():
            found += held.values()
        return [tensor.clone() for tensor in found]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def any_rank(value: bool) -> bool:
    return Agreement(CPU)(value)


def every_allocation(allocator: CountingAllocator, agree: Agreement, op_retry: str) -> dict[str, Any]:
    """Rank 1 fails at each allocation of a step; all ranks must come to DDP's bits, and stop together."""
    want, second = Run().plain(), dist.get_rank() == 1
    wrong: list[int] = []
    kinds: set[str] = set()
    at, going = 0, True
    while going:
        run = Run(wrapped=at % 2 == 0)
        survivor = Survivor(None, run.call, device=CPU, agree=agree, op_retry=op_retry)
        if second:
            allocator.fail_at(at, 256)
        run.survive(survivor)
        left = allocator.fails_in
        allocator.fail_at(0)
        found = run.state()
        kinds.update(survivor.counts)
        if not equal(found, want):
            wrong.append(at)
        going = not any_rank(second and left > 0)
        at += 1
    return {"tried": at - 2, "wrong": wrong, "kinds": sorted(kinds)}


def gives_up(agree: Agreement) -> dict[str, Any]:
    """Rank 1 never has the memory: both raise, none waits."""
    run = Run()
    survivor = Survivor(None, run.call, device=CPU, agree=agree, split=True)

    def micro() -> Tensor:
        if dist.get_rank() == 1:
            raise MemoryError
        return run.micro(run.tokens)

    try:
        survivor.attempt(micro, parts=lambda count: [micro] * min(count, 4))
    except LanewayError as error:
        return {"said": str(error), "kinds": [event.kind for event in survivor.events]}
    return {}


def uneven() -> dict[str, Any]:
    """Gradients that some ranks lack, or all; buckets of any size; two dtypes."""
    rank = dist.get_rank()
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros(3)) for name in ("both", "one", "none")})
    model["low"] = nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16).t())
    model["both"].grad = torch.full((3,), 1.0 + rank)
    model["low"].grad = torch.full((3, 2), 2.0 * rank, dtype=torch.bfloat16)
    if rank == 1:
        model["one"].grad = torch.ones(3)
    reduce_gradients(model, bucket_bytes=16)
    return {name: None if p.grad is None else p.grad.flatten().tolist() for name, p in model.items()}


def no_room(allocator: CountingAllocator) -> dict[str, Any]:
    """Rank 1 has no memory for a bucket: both say so, and gradients stay."""
    model = nn.Linear(64, 64)
    model.weight.grad, model.bias.grad = torch.ones(64, 64), torch.ones(64)
    if dist.get_rank() == 1:
        allocator.limit(allocator.live + 8000)
    try:
        reduce_gradients(model)
        said = ""
    except LanewayError as error:
        said = str(error)
    allocator.limit(None)
    return {"said": said, "kept": bool((model.weight.grad == 1).all())}


def sharded(allocator: CountingAllocator) -> dict[str, Any]:
    """FSDP2: ops are tried again on one rank; what can't be is said."""
    found: dict[str, Any] = {}
    torch.manual_seed(3)
    model = Net()
    fully_shard(model.mix)
    fully_shard(model)
    tokens = torch.randint(0, 11, (4, 5))
    survivor = Survivor(None, model, device=CPU, agree=any_rank)
    if dist.get_rank() == 1:
        allocator.fail_at(1, 1200)
    survivor.attempt(lambda: loss_of(model, tokens).backward())
    found["counts"], found["left"] = dict(survivor.counts), allocator.fails_in

    def fails() -> None:
        raise MemoryError

    try:
        survivor.attempt(fails)
    except LanewayError as error:
        found["said"] = str(error)
    try:
        reduce_gradients(model)
    except LanewayError as error:
        found["reduce"] = str(error)
    return found


def refusals() -> dict[str, Any]:
    said = []
    for options, agree in (({"forward_sync_buffers": False}, None), ({"forward_sync_buffers": True}, any_rank)):
        try:
            Survivor(None, DistributedDataParallel(Net(), **options), device=CPU, agree=agree)
        except LanewayError as error:
            said.append(str(error))
    return {"said": said}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    allocator = CountingAllocator.install()
    agree = Agreement(CPU)
    Run().plain()
    gc.freeze()
    found = {
        "replayed": every_allocation(allocator, agree, "never"),
        "retried": every_allocation(allocator, agree, "always"),
        "gives_up": gives_up(agree),
        "uneven": uneven(),
        "no_room": no_room(allocator),
        "refusals": refusals(),
        "sharded": sharded(allocator),
    }
    (Path(sys.argv[1]) / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
