"""Cases that eight ranks run: each appends what it finds wrong."""

from __future__ import annotations

from datetime import timedelta

import torch
from reduce_inputs import all_inputs, differs, same_everywhere

from laneway.cluster.reduce.groups import LevelGroups
from laneway.cluster.reduce.reducer import HierarchicalReducer
from laneway.cluster.reduce.scheme import ALGORITHMS, FLAT, WIRES, LevelScheme, ReductionScheme

TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SIZES = (0, 1, 5, 8, 1543)
CUBE = [(rank // 4, rank // 2 % 2) for rank in range(8)]
LIMIT = timedelta(seconds=20)
Problems = list[str]


def check_all_reduce(
    reducer: HierarchicalReducer, problems: Problems, generator: torch.Generator, length: int, turn: int
) -> None:
    scheme, dtype = reducer.scheme, TYPES[turn % len(TYPES)]
    op = ("sum", "mean")[turn // 4 % 2]
    inputs = all_inputs(length, dtype, generator)
    mine = inputs[reducer.groups.rank].clone()
    result = reducer.all_reduce(mine, op=op)
    wrong = "another tensor came back" if result is not mine else differs(mine, inputs, scheme, reducer.groups.sizes, op)
    if wrong or not same_everywhere(mine):
        problems.append(f"{scheme} {op} of {length} {dtype}: {wrong or 'bits differ between ranks'}")


def every_scheme(problems: Problems, generator: torch.Generator) -> None:
    """Each algorithm with each wire, in one piece and in several, types and sizes taking turns."""
    groups = LevelGroups.from_positions(CUBE, timeout=LIMIT)
    reducer, turn = HierarchicalReducer(groups), 0
    schemes = [FLAT] + [
        ReductionScheme((LevelScheme(algorithm, wire),) * 3, chunk)
        for algorithm in ALGORITHMS
        if algorithm != "torus"
        for wire in WIRES
        for chunk in (0, 1024)
    ]
    for scheme in schemes:
        reducer.set_scheme(scheme)
        for length in SIZES:
            check_all_reduce(reducer, problems, generator, length, turn)
            turn += 1
    reducer.close()
    groups.close()


CASES = {"every scheme": every_scheme}
