"""Four gloo ranks, forked after one import of torch: each runs every case and writes down what it got.

A case names the members of the group, the dropper's options and the steps' vectors; ``gradient`` makes a rank's vectors from a
seed, so that the tests can make the same ones.
"""

from __future__ import annotations

import datetime
import itertools
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # DDP imports it: once, before the fork
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from laneway.cluster.drop import GradientDropper, Pieces, PowerSGD
from laneway.cluster.reduce.groups import LevelGroups
from laneway.cluster.reduce.reducer import HierarchicalReducer
from laneway.cluster.reduce.scheme import FLAT, LevelScheme, ReductionScheme
from laneway.core import LanewayError

WORLD = 4
STEPS = 3


@dataclass(frozen=True)
class Case:
    """One dropper in use.

    Attributes:
        members: the first so many ranks.
        entries: of the vector.
        kind: of its values, see ``gradient``.
        options: of the dropper.
        steps: calls.
        spoiled: (rank, step, entry, value) that is put in.
    """

    members: int
    entries: int
    kind: str = "wide"
    options: dict[str, Any] = field(default_factory=dict)
    steps: int = STEPS
    spoiled: tuple[int, int, int, float] | None = None

    @property
    def pieces(self) -> Pieces:
        return layout(self.entries)


def layout(entries: int) -> Pieces:
    """A small parameter, a large one and one of middle size."""
    return Pieces.of({"bias": entries // 50, "weight": entries - entries // 50 - entries // 5, "embedding": entries // 5})


FORMATS = [("entries", 0.44), ("entries", 0.99), ("blocks", 0.9), ("blocks", 0.995), ("auto", 0.0)]
SIZES = [1, 63, 65, 4000]
CASES: dict[str, Case] = {
    f"{wire} {unit} {drop} {residual} {entries}x{members}": Case(
        members, entries, options={"wire": wire, "unit": unit, "drop": drop, "residual": residual, "sample": 256}
    )
    for number, (wire, (unit, drop), residual) in enumerate(
        itertools.product(("fp32", "bf16", "int8"), FORMATS, ("fp64", "fp32"))
    )
    for entries, members in [(SIZES[number % 3], 2 + number % 3), (SIZES[3], 2 + (number + 1) % 3)][number % 2 :]
}
CASES |= {
    "alone": Case(1, 500, options={"drop": 0.9}),
    "empty": Case(4, 0, options={"drop": 0.9}),
    "zeros": Case(3, 900, "zero", {"drop": 0.5}),
    "same": Case(3, 900, "same", {"drop": 0.5, "unit": "entries"}),
    "huge entry": Case(2, 3000, "huge entry", {"drop": 0.5, "sample": 512}),
    "large": Case(2, 640, "large", {"drop": 0.5, "wire": "bf16"}),
    "burst": Case(2, 4096, "burst", {"drop": 0.9, "unit": "entries", "sample": 512}, steps=6),
    "without feedback": Case(3, 2000, options={"drop": 0.9, "feedback": False}),
    "warm-up": Case(2, 2048, options={"drop": 0.9, "warmup": 4, "unit": "entries"}, steps=6),
}
CASES |= {
    f"spoiled {wire} {value} {residual}": Case(
        3, 1000, options={"drop": drop, "wire": wire, "residual": residual}, spoiled=(1, 1, 700, value)
    )
    for wire, value, drop, residual in [
        ("fp32", float("nan"), 0.5, "fp64"),
        ("bf16", float("inf"), 0.9, "fp32"),
        ("int8", float("-inf"), 0.9, "fp64"),
        ("fp32", float("nan"), 0.99, "fp32"),
        ("fp32", float("nan"), 0.0, "fp64"),
    ]
}


def gradient(case: Case, rank: int, step: int, seed: int) -> Tensor:
    """fp32 [entries]: full 24-bit values within a factor of 2^12, so that fp64 adds them without rounding, unless said."""
    draw = torch.Generator().manual_seed(seed + 1000 * rank + step)
    n = case.entries
    values = (1 + torch.rand(n, generator=draw)) * 2.0 ** torch.randint(-6, 6, (n,), generator=draw)
    values *= torch.randint(0, 2, (n,), generator=draw) * 2 - 1
    if case.kind == "zero":
        values.zero_()
    elif case.kind == "same":
        values.fill_(0.75)
    elif case.kind == "huge entry":
        values[n // 2] = 2.0**20
    elif case.kind == "large":
        values *= 2.0**121
    elif case.kind == "burst":
        values *= 1000.0 if step == 3 else 1.0
    if case.spoiled and case.spoiled[:2] == (rank, step):
        values[case.spoiled[2]] = case.spoiled[3]
    return values


def dense(dropper: GradientDropper, pieces: Pieces) -> Tensor:
    """The residuals in the vector's order, fp64."""
    out = torch.zeros(pieces.numel, dtype=torch.float64)
    for piece, values in dropper.residuals():
        for start, other in pieces:
            low, high = max(piece.start, other.start), min(piece.stop, other.stop)
            if piece.name == other.name and low < high:
                into = slice(start + low - other.start, start + high - other.start)
                out[into] += values[low - piece.start : high - piece.start].double()
    return out


def run_case(case: Case, group: dist.ProcessGroup, rank: int, seed: int) -> dict[str, Any]:
    dropper = GradientDropper(**case.options)
    found: dict[str, Any] = {"results": [], "residuals": [], "sent": [], "planned": []}
    for step in range(case.steps):
        vector = gradient(case, rank, step, seed)
        before = dropper.sent_bytes
        planned = dropper.planned_bytes(case.entries, case.members, rank) if step == 0 else None
        dropper.all_reduce(vector, group, case.pieces)
        found["planned"].append(planned)
        found["results"].append(vector)
        found["residuals"].append(dense(dropper, case.pieces))
        found["sent"].append(dropper.sent_bytes - before)
    return found | {"dense": dropper.dense_bytes}


def resumed(group: dist.ProcessGroup, rank: int, seed: int) -> list[Tensor]:
    """Twelve steps of two vectors with warm-up; then the same with a save and a load after the sixth: the results of both."""
    found = []
    for stop in (None, 6):
        options = {"drop": 0.9, "warmup": 9, "sample": 64}
        dropper, results = GradientDropper(**options), []
        for step in range(12):
            if step == stop:
                state = dropper.state_dict()
                dropper.all_reduce(torch.ones(1000), group, layout(1000))  # what comes after a save is not in it
                dropper = GradientDropper(**options)
                dropper.load_state_dict(state)
            for number in range(2):
                vector = gradient(Case(WORLD, 1000), rank, 100 * number + step, seed)
                key = Pieces.of({f"p{number}": 300, f"q{number}": 700})
                results.append(dropper.all_reduce(vector, group, key))
        found.append(torch.stack(results))
    return found


def rebuilt(group: dist.ProcessGroup, rank: int, seed: int) -> dict[str, Tensor]:
    """Residuals find their parameters where the vectors change from step to step, some through ``carry_into``."""
    dropper, total, received = GradientDropper(0.9, sample=64), torch.zeros(1200).double(), torch.zeros(1200).double()
    whole = Pieces.of({"a": 500, "b": 700})
    swapped = Pieces.of({"b": 700, "a": 500})
    plans = [[whole], [swapped], [swapped.shard(0, 640), swapped.shard(640, 1200)], [whole.shard(64, 1000)], [whole]]
    for step, keys in enumerate([plans[0], *plans, plans[4]]):
        for number, key in enumerate(keys):
            case = Case(WORLD, key.numel)
            vector = gradient(case, rank, 10 * step + number, seed)
            total += scattered(vector, key, whole)
            dropper.carry_into(vector, key)
            dropper.all_reduce(vector, group, key)
            received += scattered(vector, key, whole)
    return {"total": total, "received": received, "left": dense(dropper, whole)}


def scattered(vector: Tensor, key: Pieces, whole: Pieces) -> Tensor:
    """A vector's entries where ``whole`` has them, fp64."""
    out = torch.zeros(whole.numel, dtype=torch.float64)
    starts = {piece.name: start for start, piece in whole}
    for start, piece in key:
        out[starts[piece.name] + piece.start :][: len(piece)] = vector[start : start + len(piece)].double()
    return out


def whole_numbers(entries: int, rank: int, step: int, seed: int) -> Tensor:
    """fp32 [entries], which add up without rounding in fp32 too."""
    draw = torch.Generator().manual_seed(seed + 1000 * rank + step)
    return torch.randint(-99, 100, (entries,), generator=draw).float()


def through_levels(rank: int, seed: int, limit: datetime.timedelta) -> dict[str, Tensor]:
    """Two hosts of two ranks; chunks change their size on the way, and at last nothing is dropped any more."""
    groups = LevelGroups.from_positions([("x",), ("y",), ("x",), ("y",)], timeout=limit)
    reducer = HierarchicalReducer(groups, FLAT)
    dropper = reducer.dropper = GradientDropper(sample=64)
    key, total, received = layout(3000), torch.zeros(3000).double(), torch.zeros(3000).double()
    left, sent = [], []
    schemes = [
        ReductionScheme((LevelScheme(), LevelScheme(wire="bf16", drop=drop)), chunk)
        for drop, chunk in ((0.9, 0), (0.9, 4096), (0.5, 4096), (0.5, 0))
    ]
    for step, scheme in enumerate([*schemes, FLAT]):
        reducer.set_scheme(scheme)
        if scheme is FLAT:
            dropper.release()
        before = reducer.sent_bytes[-1] + dropper.sent_bytes
        vector = whole_numbers(3000, rank, step, seed)
        total += vector.double()
        dropper.carry_into(vector, key)
        reducer.all_reduce(vector, key=key)
        received += vector.double()
        left.append(dense(dropper, key))
        sent.append(reducer.sent_bytes[-1] + dropper.sent_bytes - before)
    reducer.close()
    groups.close()
    return {"total": total, "received": received, "left": torch.stack(left), "sent": torch.tensor(sent)}


def fewer_ranks(groups: dict[int, dist.ProcessGroup], rank: int, seed: int) -> dict[str, Tensor]:
    """Four ranks save, two go on: each takes over the residuals of one that is gone."""
    options, key = {"drop": 0.9, "sample": 64}, layout(700)
    dropper, total, received = GradientDropper(**options), torch.zeros(700).double(), torch.zeros(700).double()
    states: list[Any] = [None] * WORLD
    for step in range(5):
        if step == 3:
            dist.all_gather_object(states, dropper.state_dict())
            dropper = GradientDropper(**options)
            if rank >= 2:
                break
            dropper.load_state_dict(states[rank])
            dropper.adopt(states[rank + 2])
        vector = whole_numbers(700, rank, step, seed)
        total += vector.double()
        moved = dropper.carry_into(vector, key)
        assert (moved > 0) == (step == 3)
        dropper.all_reduce(vector, groups[WORLD if step < 3 else 2], key)
        received += vector.double()
    return {"total": total, "received": received, "left": dense(dropper, key)}


def low_rank(rank: int, seed: int) -> dict[str, Any]:
    """PowerSGD on DDP: gradients of eight steps, a save and a load after the fifth; each rank's own gradients beside them."""
    found: dict[str, Any] = {"given": [], "got": [], "errors": []}
    state: dict[str, Any] = {}
    powersgd: Any = None
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Tanh(), torch.nn.Linear(30, 20))
    for step in range(10):
        if step in (0, 5):
            state = powersgd.state_dict() if step else {}
            torch.manual_seed(seed)
            wrapped = DistributedDataParallel(model, bucket_cap_mb=0.004)
            powersgd = PowerSGD(wrapped, rank=2, start=3)
            if state:
                powersgd.load_state_dict(state)
        inputs = torch.randn(64, 40, generator=torch.Generator().manual_seed(seed + 100 * rank + step))
        model.zero_grad()
        model(inputs).square().mean().backward()
        found["given"].append({name: p.grad.clone() for name, p in model.named_parameters()})
        model.zero_grad()
        wrapped(inputs).square().mean().backward()
        found["got"].append({name: p.grad.clone() for name, p in model.named_parameters()})
        found["errors"].append(powersgd.state_dict()["errors"])
    try:
        PowerSGD(wrapped, rank=1, start=2)
    except LanewayError as error:
        found["second"] = str(error)
    return found


def rank_main(rank: int, folder: str, seed: int) -> None:
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=30)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD, timeout=limit)
    groups = {size: dist.new_group(list(range(size)), timeout=limit) for size in range(1, WORLD + 1)}
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        if rank < case.members:
            found[name] = run_case(case, groups[case.members], rank, seed)
    found["resumed"] = resumed(groups[WORLD], rank, seed)
    found["rebuilt"] = rebuilt(groups[WORLD], rank, seed)
    found["through levels"] = through_levels(rank, seed, limit)
    found["fewer ranks"] = fewer_ranks(groups, rank, seed)
    found["low rank"] = low_rank(rank, seed)
    torch.save(found, Path(folder) / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.start_processes(rank_main, args=(sys.argv[1], int(sys.argv[2])), nprocs=WORLD, start_method="fork")
