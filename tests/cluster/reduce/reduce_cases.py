"""Cases that eight ranks run: each appends what it finds wrong."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import refusals_and_failures
import torch
import torch.distributed as dist
from reduce_inputs import all_inputs, differs, same_everywhere
from torch import Tensor

from laneway.cluster.reduce.check import check_reducer
from laneway.cluster.reduce.defaults import direct_scheme
from laneway.cluster.reduce.groups import LevelGroups
from laneway.cluster.reduce.reducer import HierarchicalReducer
from laneway.cluster.reduce.scheme import ALGORITHMS, FLAT, WIRES, LevelScheme, ReductionScheme
from laneway.cluster.topology import Topology

TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SIZES = (0, 1, 5, 8, 1543)
CUBE = [(rank // 4, rank // 2 % 2) for rank in range(8)]
FOURS, PAIRS, FLAT_PLACES = [(rank // 4,) for rank in range(8)], [(rank // 2,) for rank in range(8)], [()] * 8
LIMIT = timedelta(seconds=20)
Problems = list[str]


@contextmanager
def reducing(positions: Sequence[Sequence[int]], scheme: ReductionScheme = FLAT) -> Iterator[HierarchicalReducer]:
    groups = LevelGroups.from_positions(positions, timeout=LIMIT)
    reducer = HierarchicalReducer(groups, scheme)
    try:
        yield reducer
    finally:
        reducer.close()
        groups.close()


def reduce_and_compare(
    reducer: HierarchicalReducer, problems: Problems, inputs: Tensor, op: str = "sum", asynchronous: bool = False
) -> None:
    """All-reduce this rank's row and compare with the exact sum and with the other ranks."""
    mine = inputs[reducer.groups.rank].clone()
    if asynchronous:
        result = reducer.all_reduce(mine, op=op, async_op=True).wait()
    else:
        result = reducer.all_reduce(mine, op=op)
    scheme = reducer.scheme
    wrong = "another tensor came back" if result is not mine else differs(mine, inputs, scheme, reducer.groups.sizes, op)
    if wrong or not same_everywhere(mine):
        what = f"{scheme} {op} of {mine.numel()} {mine.dtype} in levels {reducer.groups.sizes}"
        problems.append(f"{what}: {wrong or 'bits differ between ranks'}")


def scatter_and_gather(reducer: HierarchicalReducer, problems: Problems, inputs: Tensor, op: str = "sum") -> None:
    """Reduce-scatter, and gather what came of it; compare with the exact sum and with a flat gather."""
    rank, world = reducer.groups.rank, reducer.groups.world
    length = inputs.shape[1] // world
    given = inputs[rank].clone()
    own = torch.full((length,), torch.nan, dtype=inputs.dtype)
    reducer.reduce_scatter(own, given, op=op)
    part = inputs[:, rank * length : (rank + 1) * length]
    scheme = reducer.scheme
    what = f"{scheme} of {length} {inputs.dtype} in levels {reducer.groups.sizes}"
    if wrong := differs(own, part, scheme, reducer.groups.sizes, op):
        problems.append(f"reduce_scatter {what}: {wrong}")
    if not torch.equal(given, inputs[rank]):
        problems.append(f"reduce_scatter {what}: the input was changed")
    whole = torch.empty(length * world, dtype=inputs.dtype)
    reducer.all_gather(whole, own)
    rows = [torch.empty_like(own) for _ in range(world)]
    dist.all_gather(rows, own)
    if not torch.equal(whole, torch.cat(rows)):
        problems.append(f"all_gather {what}: not what a flat one gives")


def every_scheme(problems: Problems, generator: torch.Generator) -> None:
    """Each algorithm with each wire, in one piece and in several; types, sizes and operations take turns."""
    plain = [algorithm for algorithm in ALGORITHMS if algorithm != "torus"]
    schemes = [FLAT] + [
        ReductionScheme((LevelScheme(algorithm, wire),) * 3, chunk)
        for algorithm, wire, chunk in itertools.product(plain, WIRES, (0, 1024))
    ]
    turns = itertools.product(("sum", "mean"), TYPES, SIZES)
    with reducing(CUBE) as reducer:
        for number, scheme in enumerate(schemes):
            reducer.set_scheme(scheme)
            for op, dtype, length in itertools.islice(itertools.cycle(turns), 3):
                reduce_and_compare(reducer, problems, all_inputs(length, dtype, generator), op, number % 2 == 1)
            scatter_and_gather(reducer, problems, all_inputs(8 * (number % 4 * 37), TYPES[number % 4], generator), "mean")


def mixed_levels_and_tori(problems: Problems, generator: torch.Generator) -> None:
    """Another algorithm and wire at each level, tori of one to three axes, and rings of more than two."""
    torus, other = LevelScheme("torus", "fp32", (2, 2, 2)), LevelScheme("torus", "bf16", (4, 2))
    ring, tree = LevelScheme("ring", "int8"), LevelScheme("tree")
    one_level = [
        torus,
        other,
        ring,
        tree,
        LevelScheme("torus", "int8", (2, 1, 4)),
        LevelScheme(wire="bf16"),
        LevelScheme("native"),
    ]
    for positions, levels in (
        (FLAT_PLACES, [(level,) for level in one_level]),
        (FOURS, [(LevelScheme("torus", dims=(2, 2)), ring), (ring, tree), (tree, LevelScheme())]),
        ([(rank % 2,) for rank in range(8)], [(ring, LevelScheme(wire="bf16")), (LevelScheme("native"), LevelScheme("ring"))]),
    ):
        with reducing(positions) as reducer:
            for number, each in enumerate(levels):
                for chunk, length in ((0, 3), (1024, 1001)):
                    reducer.set_scheme(ReductionScheme(each, chunk))
                    reduce_and_compare(reducer, problems, all_inputs(length, TYPES[number % 4], generator), "mean")
                    scatter_and_gather(reducer, problems, all_inputs(8 * 131, TYPES[number % 4], generator))


def levels_of_any_shape(problems: Problems, generator: torch.Generator) -> None:
    """Levels of size 1, ragged hosts and racks, four levels, and ranks spread over hosts."""
    ragged = [(0, 0), (0, 0), (0, 0), (0, 1), (1, 0), (1, 0), (1, 1), (1, 2)]
    shapes = [
        [(0, 0)] * 8,
        [(rank, 0) for rank in range(8)],
        [(0, rank) for rank in range(8)],
        [(rank // 4, 0, rank // 2 % 2) for rank in range(8)],
        [(rank % 2, rank // 2 % 2) for rank in range(8)],
        ragged,
        [(0,), (0,), (0,), (1,), (0,), (0,), (0,), (0,)],
    ]
    for number, positions in enumerate(shapes):
        with reducing(positions) as reducer:
            depth = len(reducer.groups.names)
            mixed = ReductionScheme(tuple(LevelScheme(each) for each in ("ring", "native", "tree", "ring")[:depth]), 1024)
            for turn, scheme in enumerate((direct_scheme(depth, outer_wire="bf16", chunk_bytes=1024), mixed, FLAT)):
                reducer.set_scheme(scheme)
                dtype, length = TYPES[(number + turn) % 4], (2, 1777)[(number + turn) % 2]
                reduce_and_compare(reducer, problems, all_inputs(length, dtype, generator), "mean")
                scatter_and_gather(reducer, problems, all_inputs(8 * 57, dtype, generator))
            reducer.set_scheme(direct_scheme(depth))
            check_reducer(reducer)


def extremes_in_half_precision(problems: Problems, generator: torch.Generator) -> None:
    """6e4 and 1e-7 on every rank come through as means: divided once, after the sum, before they are rounded."""
    with reducing(CUBE) as reducer:
        for scheme in (direct_scheme(3), direct_scheme(3, outer_wire="bf16"), ReductionScheme((LevelScheme("ring"),) * 3), FLAT):
            reducer.set_scheme(scheme)
            for dtype in (torch.float16, torch.bfloat16):
                numbers = torch.tensor([6e4, -6e4, 1e-7, 0.0], dtype=dtype)
                means = reducer.all_reduce(numbers.clone(), op="mean")
                near = 2.0**-7 if scheme.levels and scheme.levels[-1].wire == "bf16" else 0
                if not torch.allclose(means, numbers, rtol=near, atol=0):
                    problems.append(f"{scheme} {dtype}: means of {numbers.tolist()} are {means.tolist()}")
        reducer.set_scheme(direct_scheme(3, outer_wire="int8"))
        numbers = torch.randn(700, generator=generator)
        numbers[300 + reducer.groups.rank] = torch.inf
        if reducer.all_reduce(numbers)[300:308].isfinite().any():
            problems.append("an infinite gradient got lost on the int8 wire")


def bytes_that_are_sent(problems: Problems, generator: torch.Generator) -> None:
    """What each rank sends over each level, counted in the exchanges, is what the formulas say."""
    count, full = 8 * 1024, 8 * 1024 * 4
    direct, narrow = LevelScheme(), LevelScheme(wire="bf16")
    # Up and down each: (p-1)/p of what a rank holds at the level; the turn both.
    cube = [full * 1 // 2 * 2, full // 2 * 1 // 2 * 2, full // 4]
    rings = (LevelScheme("ring"),) * 3
    int8 = full // 4 // 4 + 4 * (count // 4 // 128)
    both = full * 7 // 8 * 2
    cases = [
        (CUBE, (direct,) * 3, cube),
        (CUBE, rings, cube),
        (CUBE, (direct, direct, narrow), [*cube[:2], cube[2] // 2]),
        (CUBE, (narrow,) * 3, [each // 2 for each in cube]),
        (CUBE, (direct, direct, LevelScheme(wire="int8")), [*cube[:2], int8]),
        (FLAT_PLACES, (direct,), [both]),
        (FLAT_PLACES, (LevelScheme("ring"),), [both]),
        (FLAT_PLACES, (LevelScheme("torus", dims=(2, 4)),), [both]),
        (FLAT_PLACES, (LevelScheme("ring", "bf16"),), [both // 2 + both // 4]),
        (FOURS, (direct, direct), [full * 3 // 4 * 2, full // 4]),
        (PAIRS, (direct, direct), [full, full // 2 * 3 // 4 * 2]),
    ]
    for positions, some in itertools.groupby(cases, key=lambda case: case[0]):
        with reducing(positions) as reducer:
            for (_, levels, expected), chunk in itertools.product(list(some), (0, 4096)):
                reducer.set_scheme(ReductionScheme(levels, chunk))
                before = reducer.sent_bytes
                reducer.all_reduce(torch.randn(count, generator=generator))
                sent = [after - each for after, each in zip(reducer.sent_bytes, before, strict=True)]
                if sent != expected:
                    problems.append(f"{reducer.scheme}: sent {sent}, not {expected}")
    with reducing(CUBE, direct_scheme(3)) as reducer:
        reducer.reduce_scatter(torch.empty(count // 8), torch.randn(count, generator=generator))
        scattered = reducer.sent_bytes
        reducer.all_gather(torch.empty(count), torch.randn(count // 8, generator=generator))
        halves = [cube[0] // 2, cube[1] // 2, cube[2] // 2]
        if scattered != halves or reducer.sent_bytes != [2 * each for each in halves]:
            problems.append(f"reduce-scatter sent {scattered}, with an all-gather {reducer.sent_bytes}; {halves} each")


def asynchronous_and_changing(problems: Problems, generator: torch.Generator) -> None:
    """Many reductions under way at once, the scheme changing between them; futures; observers."""
    schemes = [
        direct_scheme(3, chunk_bytes=1024),
        FLAT,
        direct_scheme(3, outer_wire="bf16"),
        ReductionScheme((LevelScheme("ring"),) * 3),
    ]
    with reducing(CUBE, schemes[0]) as reducer:
        timings = []
        reducer.observers.append(timings.append)
        waiting = []
        for turn in range(12):
            reducer.set_scheme(schemes[turn % 4])
            inputs = all_inputs(int(torch.randint(1, 3000, (), generator=generator)), TYPES[turn % 4], generator)
            mine = inputs[reducer.groups.rank].clone()
            work = reducer.all_reduce(mine, op="mean", async_op=True)
            future = work.future().then(lambda done: done.value()) if turn % 2 else None
            waiting.append((schemes[turn % 4], inputs, mine, work, future))
        for scheme, inputs, mine, work, future in reversed(waiting):
            result = future.wait() if future is not None else work.wait()
            work.wait()
            wrong = differs(mine, inputs, scheme, reducer.groups.sizes, "mean")
            if wrong or result.data_ptr() != mine.data_ptr() or not work.done() or work.exception() is not None:
                problems.append(f"{scheme}: {wrong or 'the work or its future is wrong'}")
        kinds = {(timing.level, timing.phase) for timing in timings}
        if kinds != {(0, "up"), (1, "up"), (2, "top"), (1, "down"), (0, "down"), (-1, "flat")}:
            problems.append(f"phases seen: {sorted(kinds)}")
        sent = [sum(timing.nbytes for timing in timings if timing.level == level) for level in range(3)]
        if sent != reducer.sent_bytes or any(timing.seconds <= 0 for timing in timings):
            problems.append(f"observers saw {sent} bytes, {reducer.sent_bytes} were sent")


def places_from_the_ranks(problems: Problems, generator: torch.Generator) -> None:
    """Hosts from identities, not from rank numbers, where one rank made a group of its own before; and from a topology."""
    rank = dist.get_rank()
    if rank == 3:
        dist.new_group([3], use_local_synchronization=True)
    machines = ["node7", "node66", "node8", "node70"]
    os.environ |= {"NCCL_HOSTID": machines[rank % 4], "NODE_NAME": machines[rank % 4]}
    groups = LevelGroups.detect(timeout=LIMIT)
    reducer = HierarchicalReducer(groups, direct_scheme(2), debug=True)
    if groups.ranks[0] != tuple(sorted((rank % 4, rank % 4 + 4))) or groups.names != ("L1", "L2"):
        problems.append(f"host group {groups.ranks[0]}, levels {groups.names}")
    reduce_and_compare(reducer, problems, all_inputs(99, torch.float32, generator))
    reducer.close()
    groups.close()
    groups = LevelGroups.from_topology(Topology.parse("2xCPU_2nodes_2racks"), order=[0, 2, 4, 6, 1, 3, 5, 7], timeout=LIMIT)
    reducer = HierarchicalReducer(groups, direct_scheme(3))
    if groups.places.groups[0] != ((0, 2), (4, 6), (1, 3), (5, 7)) or groups.names != ("L1", "L2", "L3"):
        problems.append(f"groups of hosts from a topology: {groups.places.groups[0]}")
    reduce_and_compare(reducer, problems, all_inputs(99, torch.float32, generator))
    reducer.close()
    groups.close()


CASES = {
    "every scheme": every_scheme,
    "mixed levels and tori": mixed_levels_and_tori,
    "levels of any shape": levels_of_any_shape,
    "extremes in half precision": extremes_in_half_precision,
    "bytes that are sent": bytes_that_are_sent,
    "asynchronous and changing": asynchronous_and_changing,
    "places from the ranks": places_from_the_ranks,
    **refusals_and_failures.CASES,
}
