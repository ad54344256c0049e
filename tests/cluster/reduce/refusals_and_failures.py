"""Cases of what is refused, what is dropped, and what happens when a collective fails. The last ones leave broken groups."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from laneway.cluster.reduce.check import check_reducer
from laneway.cluster.reduce.defaults import direct_scheme
from laneway.cluster.reduce.groups import LevelGroups
from laneway.cluster.reduce.reducer import HierarchicalReducer
from laneway.cluster.reduce.scheme import FLAT, LevelScheme, ReductionScheme
from laneway.cluster.reduce.work import ReductionError
from laneway.core import InputError, LanewayError

CUBE = [(rank // 4, rank // 2 % 2) for rank in range(8)]
Problems = list[str]


def refused(problems: Problems, kind: type[Exception], word: str, call: Callable[[], object]) -> None:
    try:
        call()
    except kind as error:
        if word not in str(error):
            problems.append(f"{word!r} isn't in {error}")
    else:
        problems.append(f"{kind.__name__} with {word!r} wasn't raised")


@contextmanager
def reducing(scheme: ReductionScheme, seconds: float = 20, debug: bool = False) -> Iterator[HierarchicalReducer]:
    groups = LevelGroups.from_positions(CUBE, timeout=timedelta(seconds=seconds))
    reducer = HierarchicalReducer(groups, scheme, debug=debug)
    yield reducer
    reducer.close()


def bad_input(problems: Problems, generator: torch.Generator) -> None:
    """Integers would wrap, gaps would be missed, tori must fit, ranks must agree: said before anything travels."""
    with reducing(direct_scheme(3)) as reducer:
        for dtype in (torch.int8, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn):
            refused(problems, InputError, "float32", lambda dtype=dtype: reducer.all_reduce(torch.zeros(8).to(dtype)))
        refused(problems, InputError, "contiguous", lambda: reducer.all_reduce(torch.zeros(4, 4).t()))
        refused(problems, InputError, "mean", lambda: reducer.all_reduce(torch.zeros(4), op="average"))
        refused(problems, InputError, "8 times", lambda: reducer.reduce_scatter(torch.zeros(4), torch.zeros(31)))
        refused(problems, InputError, "dtype", lambda: reducer.all_gather(torch.zeros(8), torch.zeros(1).double()))
        refused(problems, InputError, "3 levels", lambda: reducer.set_scheme(direct_scheme(2)))
        torus = ReductionScheme((LevelScheme("torus", dims=(2, 2)), LevelScheme(), LevelScheme()))
        refused(problems, InputError, "L1.dims", lambda: reducer.set_scheme(torus))
        dropping = ReductionScheme((LevelScheme(), LevelScheme(), LevelScheme(drop=0.5)))
        reducer.set_scheme(dropping)
        refused(problems, InputError, "dropper", lambda: reducer.all_reduce(torch.zeros(4)))
        check_reducer(reducer)
        if reducer.scheme != dropping:
            problems.append("the check left another scheme behind")
        whole = torch.zeros(8, dtype=torch.bool)
        reducer.all_gather(whole, torch.tensor([reducer.groups.rank % 3 == 0]))
        if whole.tolist() != [rank % 3 == 0 for rank in range(8)]:
            problems.append(f"gathered {whole.tolist()}")
        reducer.close()
        refused(problems, LanewayError, "closed", lambda: reducer.all_reduce(torch.zeros(4)))
        reducer.groups.close()
    refused(problems, InputError, "8 ranks", lambda: LevelGroups.from_positions([(0,)] * 4))
    refused(problems, InputError, "names", lambda: LevelGroups.from_positions(CUBE, names=["L1", "L2"]))
    refused(problems, InputError, "timeout", lambda: LevelGroups.from_positions(CUBE, timeout=timedelta(0)))
    mine = CUBE if dist.get_rank() else [(0, 0)] * 8
    refused(problems, LanewayError, "different groups", lambda: LevelGroups.from_positions(mine))


def ranks_that_disagree(problems: Problems, generator: torch.Generator) -> None:
    """Under debug, another scheme or another size on one rank is an error on all of them, not a wait."""
    with reducing(direct_scheme(3), debug=True) as reducer:
        odd = reducer.groups.rank == 5
        scheme = direct_scheme(3, outer_wire="bf16" if odd else "int8")
        refused(problems, LanewayError, "different things", lambda: reducer.set_scheme(scheme))
        refused(problems, LanewayError, "different things", lambda: reducer.all_reduce(torch.zeros(16 if odd else 8)))
        if reducer.all_reduce(torch.ones(8)).tolist() != [8.0] * 8:
            problems.append("a sum after a refusal is wrong")
        reducer.groups.close()


class Kept:
    """Sums everything, and keeps which ranges it was asked for; raises at the third piece where it is told to."""

    def __init__(self, breaks: bool = False) -> None:
        self.asked: list[tuple[object, int, int]] = []
        self.breaks = breaks

    def all_reduce(
        self, shard: Tensor, group: dist.ProcessGroup, key: tuple[object, int, int], *, drop: float, wire: str
    ) -> None:
        assert shard.dtype == torch.float32
        assert shard.numel() == key[2] - key[1]
        assert (drop, wire) == (0.4, "bf16")
        self.asked.append(key)
        if self.breaks and len(self.asked) == 3:
            raise ValueError("the residual is gone")
        dist.all_reduce(shard, group=group)


def dropping_on_the_outermost_level(problems: Problems, generator: torch.Generator) -> None:
    """A dropper gets this rank's share of each piece, by the range that it is in the vector; the mean is taken after it."""
    scheme = ReductionScheme((LevelScheme(), LevelScheme(), LevelScheme(wire="bf16", drop=0.4)), 4096)
    with reducing(scheme) as reducer:
        reducer.dropper = Kept()
        vector = torch.arange(2500, dtype=torch.bfloat16)
        double = torch.arange(256, dtype=torch.float64)
        results = [reducer.all_reduce(each.clone(), op="mean", key="weights") for each in (vector, double)]
        if not torch.equal(results[0], vector) or not torch.equal(results[1], double):
            problems.append("a mean is wrong")
        del reducer.dropper.asked[-1]  # the second vector's
        told: list[list[tuple[str, int, int]]] = [[] for _ in range(8)]
        dist.all_gather_object(told, reducer.dropper.asked)
        ranges = sorted((start, stop) for keys in told[:4] for _, start, stop in keys)
        complete = [start for start, _ in ranges] + [2500] == [0] + [stop for _, stop in ranges]
        if not complete or told[:4] != told[4:] or told[0][0][0] != "weights":
            problems.append(f"asked for {told}")
        reducer.groups.close()


def small_vectors(problems: Problems, generator: torch.Generator) -> None:
    """One piece goes through the caller's thread, and a flat one is a single native collective."""
    with reducing(FLAT) as reducer:
        before = threading.active_count()
        calls = []
        native, dist.all_reduce = dist.all_reduce, lambda *args, **kwargs: calls.append(kwargs) or native(*args, **kwargs)
        try:
            reducer.all_reduce(torch.ones(16384), op="mean")
            flat = len(calls)
            reducer.set_scheme(direct_scheme(3))
            reducer.all_reduce(torch.ones(16384))
        finally:
            dist.all_reduce = native
        if flat != 1 or len(calls) != 1 or threading.active_count() != before:
            problems.append(f"{flat} and {len(calls) - flat} native collectives; threads: {before}, {threading.active_count()}")
        reducer.set_scheme(direct_scheme(3, chunk_bytes=1024))
        reducer.all_reduce(torch.ones(16384))
        piped = threading.active_count() - before
        reducer.close()
        if piped != 5 or threading.active_count() != before:
            problems.append(f"{piped} threads of the pipeline, {threading.active_count() - before} after it closed")
        reducer.groups.close()


def an_error_in_a_stage(problems: Problems, generator: torch.Generator) -> None:
    """It reaches whoever waits, as an error that names the level; what follows is refused, and threads end."""
    scheme = ReductionScheme((LevelScheme(), LevelScheme(), LevelScheme(wire="bf16", drop=0.4)), 1024)
    with reducing(scheme, seconds=2) as reducer:
        reducer.dropper = Kept(breaks=True)
        work = reducer.all_reduce(torch.ones(2000), key="w", async_op=True)
        future = work.future()
        refused(problems, ReductionError, "L3 (top) among ranks", work.wait)
        refused(problems, Exception, "the residual is gone", future.wait)
        if not work.done() or not isinstance(work.exception().__cause__, ValueError):
            problems.append(f"the work holds {work.exception()!r}")
        refused(problems, ReductionError, "earlier reduction failed", lambda: reducer.all_reduce(torch.ones(8)))


def a_rank_that_stays_away(problems: Problems, generator: torch.Generator) -> None:
    """The others get an error within the groups' timeout, in one piece and in several, and flat."""
    began = time.monotonic()
    for scheme in (direct_scheme(3), direct_scheme(3, chunk_bytes=1024)):
        with reducing(scheme, seconds=1) as reducer:
            if reducer.groups.rank != 7:
                refused(problems, ReductionError, "a reduction failed at L", lambda: reducer.all_reduce(torch.ones(3000)))
    if time.monotonic() - began > 25:
        problems.append(f"it took {time.monotonic() - began:.0f} s to notice")
    dist.barrier()


CASES = {
    "bad input": bad_input,
    "ranks that disagree": ranks_that_disagree,
    "dropping on the outermost level": dropping_on_the_outermost_level,
    "small vectors": small_vectors,
    "an error in a stage": an_error_in_a_stage,
    "a rank that stays away": a_rank_that_stays_away,
}
