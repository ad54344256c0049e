"""Whether a reducer's results are right on this machine, with these groups and this backend: a check for the start of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from laneway.cluster.reduce.bound import error_bound
from laneway.cluster.reduce.checks import agree
from laneway.cluster.reduce.reducer import HierarchicalReducer
from laneway.cluster.reduce.scheme import ReductionScheme, schemes_of
from laneway.core import LanewayError, positive_int

__all__ = ["check_reducer"]

RESULT_ROUNDING = 2.0**-23


def check_reducer(reducer: HierarchicalReducer, *, length: int = 1009, device: str = "cpu") -> None:
    """Compare every collective of a reducer with sums that each rank takes by itself, in fp64. All ranks must call it.

    Fresh numbers of each rank are known to all of them by their seed. Sums and means must be within `error_bound`, gathered
    numbers the same bit for bit, and an all-reduce the same bits on all ranks. What the scheme drops is not dropped here.

    Args:
        reducer: with the scheme that is to be checked; nothing may be under way in it.
        length: elements of each rank's part; the vectors have the world size times as many.
        device: where the tensors are.

    Raises:
        LanewayError: on every rank, which result was wrong on which ranks.
    """
    positive_int("length", length)
    given, wrong = reducer.scheme, []
    try:
        for scheme in schemes_of(given):
            kept = scheme if scheme.flat else replace(scheme, levels=(*scheme.levels[:-1], replace(scheme.levels[-1], drop=0.0)))
            if kept != reducer.scheme:
                reducer.set_scheme(kept)
            wrong += [name for name, holds in _results(reducer, kept, length, torch.device(device)) if not holds]
    finally:
        if given != reducer.scheme:
            reducer.set_scheme(given)
    told: list[list[str]] = [[] for _ in range(reducer.groups.world)]
    dist.all_gather_object(told, wrong, group=reducer.groups.flat)
    by_rank = dict(zip(reducer.groups.places.order, told, strict=True))
    if any(told):
        found = "; ".join(f"rank {rank}: {', '.join(names)}" for rank, names in sorted(by_rank.items()) if names)
        raise LanewayError(f"reductions are wrong with the scheme {given} ({found})")


def _results(reducer: HierarchicalReducer, scheme: ReductionScheme, length: int, device: torch.device) -> list[tuple[str, bool]]:
    world, rank = reducer.groups.world, reducer.groups.rank
    vectors = [_numbers(of, world * length).to(device) for of in range(world)]
    exact = torch.stack(vectors).double().sum(0)
    within = _tolerance(reducer, scheme, vectors)
    part = slice(rank * length, (rank + 1) * length)
    found = []
    for op, divisor in (("sum", 1), ("mean", world)):
        whole = reducer.all_reduce(vectors[rank].clone(), op=op)
        found.append((f"all_reduce {op}", within(whole.double() * divisor, exact)))
        found.append((f"all_reduce {op}: other bits on other ranks", _same(reducer, whole)))
        own = reducer.reduce_scatter(torch.empty(length, device=device), vectors[rank], op=op)
        found.append((f"reduce_scatter {op}", within(own.double() * divisor, exact[part], part)))
    gathered = reducer.all_gather(torch.empty(world * length, device=device), vectors[rank][part].contiguous())
    rows = [vectors[of][of * length : (of + 1) * length] for of in range(world)]
    return [*found, ("all_gather", torch.equal(gathered, torch.cat(rows)))]


def _numbers(rank: int, length: int) -> Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(9176 + rank))


def _tolerance(reducer: HierarchicalReducer, scheme: ReductionScheme, vectors: list[Tensor]) -> Callable[..., bool]:
    magnitudes = torch.stack(vectors).double().abs()
    scale = magnitudes.sum(0)
    if any(level.wire == "int8" for level in scheme.levels):
        scale = magnitudes.amax(1).sum().expand_as(scale)
    allowed = scale * (error_bound(scheme, reducer.groups.sizes) + RESULT_ROUNDING)

    def within(result: Tensor, exact: Tensor, part: slice = slice(None)) -> bool:
        return bool(((result - exact).abs() <= allowed[part]).all())

    return within


def _same(reducer: HierarchicalReducer, whole: Tensor) -> bool:
    try:
        agree(reducer.groups.flat, whole.cpu().numpy().tobytes(), "")
    except LanewayError:
        return False
    return True
