"""What every rank of the lab does for `laneway bench collectives`: variants in turns, timed and counted from a common start."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laneway.bench.collectives_variants import VARIANTS, Variant
from laneway.bench.netlab import Context, Network
from laneway.cluster.reduce.exchange import all_gather_single, reduce_scatter_single
from laneway.cluster.reduce.groups import LevelGroups
from laneway.cluster.reduce.reducer import HierarchicalReducer
from laneway.cluster.reduce.scheme import ReductionScheme

__all__ = ["Measured", "measure"]

LIMIT_S = 120.0


@dataclass
class Measured:
    """One variant, one size.

    Attributes:
        seconds: of each round.
        nbytes: bytes on each direction of each link in the last round.
        error: norm of (result − exact) over norm of exact, in the first call.
        identical: whether all ranks had the same bits after it; for a reduce-scatter whether each had its part.
    """

    seconds: list[float] = field(default_factory=list)
    nbytes: dict[str, int] = field(default_factory=dict)
    error: float = 0.0
    identical: bool = True


def measure(
    context: Context,
    op: str,
    nbytes: int,
    variants: Sequence[str],
    seconds: float,
    rounds: tuple[int, int],
    schemes: Mapping[str, Mapping[str, Any]],
) -> dict[str, Measured]:
    """Time ``variants`` of one operation on vectors of ``nbytes`` in fp32, round after round; the same result on all ranks.

    Args:
        seconds: budget of the rounds.
        rounds: least and most.
        schemes: of the variants that go over the levels, as ``to_dict`` wrote them.
    """
    context.start_gloo(LIMIT_S)
    bench = _Bench(context, op, nbytes, schemes)
    found = {name: bench.first(name) for name in variants}
    spent = 0.0
    for done in range(rounds[1]):
        if done >= rounds[0] and spent + spent / done > seconds:
            break
        shift = done % len(variants)
        for name in (*variants[shift:], *variants[:shift]):
            call = bench.prepared(name)
            timed = context.timed(call)
            found[name].seconds.append(timed.seconds)
            found[name].nbytes = timed.nbytes
            spent += timed.seconds
    bench.close()
    return found


class _Bench:
    """Groups, vectors and the calls that are timed."""

    def __init__(self, context: Context, op: str, nbytes: int, schemes: Mapping[str, Mapping[str, Any]]) -> None:
        self.context, self.op = context, op
        world = context.world
        count = nbytes // 4 // world * world
        self.source = _drawn(context.rank, count)
        self.vector, self.part = torch.empty(count), torch.empty(count // world)
        self.exact = sum((_drawn(rank, count).double() for rank in range(world)), torch.zeros(count, dtype=torch.float64))
        limit = timedelta(seconds=LIMIT_S)
        spread = Network(context.network.shape, order="spread")
        order = [
            context.positions.index(place) + place_in for place in spread.hosts for place_in in range(_ranks_of(spread, place))
        ]
        self.order = {"packed": list(range(world)), "spread": order}
        self.groups = {
            name: dist.new_group(ranks, timeout=limit, sort_ranks=False, group_desc=f"bench_{name}")
            for name, ranks in self.order.items()
        }
        self.levels = LevelGroups.from_positions(context.positions, timeout=limit)
        self.reducer = HierarchicalReducer(self.levels)
        self.schemes = {name: ReductionScheme.from_dict(scheme) for name, scheme in schemes.items()}
        self.narrow = torch.empty(count, dtype=torch.bfloat16)

    def prepared(self, name: str) -> Callable[[], Any]:
        """The call, with fresh input; all that isn't part of it has been done."""
        variant = VARIANTS[name]
        self.vector.copy_(self.source)
        if self.op == "all_gather":
            self.part.copy_(self.source[: self.part.numel()])
        if variant.native:
            return self._native(variant)
        self.reducer.set_scheme(self.schemes[name])
        if variant.drop and self.reducer.dropper is None:
            from laneway.cluster.drop.dropper import GradientDropper

            self.reducer.dropper = GradientDropper(variant.drop, wire=variant.rack_wire)
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda: self.reducer.all_reduce(self.vector, key="vector"),
            "reduce_scatter": lambda: self.reducer.reduce_scatter(self.part, self.vector),
            "all_gather": lambda: self.reducer.all_gather(self.vector, self.part),
        }
        return calls[self.op]

    def _native(self, variant: Variant) -> Callable[[], Any]:
        group = self.groups[variant.order]
        if self.op == "reduce_scatter":
            return lambda: reduce_scatter_single(self.part, self.vector, group=group)
        if self.op == "all_gather":
            return lambda: all_gather_single(self.vector, self.part, group=group)
        if variant.host_wire == "fp32":
            return lambda: dist.all_reduce(self.vector, group=group)
        return lambda: self._narrow(group)

    def _narrow(self, group: Any) -> None:
        self.narrow.copy_(self.vector)
        dist.all_reduce(self.narrow, group=group)
        self.vector.copy_(self.narrow)

    def first(self, name: str) -> Measured:
        """Connections and workspaces are made here, and the result is looked at."""
        self.prepared(name)()
        result, exact = self._result(VARIANTS[name])
        wrong = (result.double() - exact).norm(), exact.norm()
        errors = self.context.gather((float(wrong[0]), float(wrong[1]), _digest(result)))
        error = max(off / size if size else off for off, size, _ in errors)
        identical = self.op == "reduce_scatter" or len({digest for *_, digest in errors}) == 1
        return Measured(error=error, identical=identical)

    def _result(self, variant: Variant) -> tuple[Tensor, Tensor]:
        place = self.order[variant.order if variant.native else "packed"]
        rows = self.exact.view(self.context.world, -1)
        if self.op == "all_reduce":
            return self.vector, self.exact
        if self.op == "reduce_scatter":
            return self.part, rows[place.index(self.context.rank)]
        parts = [_drawn(rank, self.vector.numel())[: self.part.numel()] for rank in place]
        return self.vector, torch.cat(parts).double()

    def close(self) -> None:
        """Threads and groups."""
        self.context.barrier()
        self.reducer.close()
        self.levels.close()


def _ranks_of(network: Network, place: tuple[int, int]) -> int:
    return network.shape[place[0]][place[1]]


def _drawn(rank: int, count: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank))


def _digest(numbers: Tensor) -> str:
    return hashlib.sha256(numbers.numpy().tobytes()).hexdigest()
