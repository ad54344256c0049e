"""What eight ranks check of a measurement."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from laneway.cluster.costs.measured import predict
from laneway.cluster.costs.sized import scheme_table
from laneway.cluster.probe.measure import measure
from laneway.cluster.reduce.check import check_reducer
from laneway.cluster.reduce.groups import LevelGroups
from laneway.cluster.reduce.reducer import HierarchicalReducer
from laneway.cluster.reduce.scheme import LevelScheme, ReductionScheme, SchemeTable

SHAPES = {"2x2x2": [(rank // 4, rank // 2 % 2) for rank in range(8)], "3+5": [(int(rank > 2),) for rank in range(8)]}
SIZES = (1 << 12, 1 << 16, 1 << 18, 1 << 19)


def measured(problems: list[str], generator: torch.Generator) -> None:
    """The same network on all ranks, of which a table of schemes is made that the reducer takes."""
    for name, positions in SHAPES.items():
        groups = LevelGroups.from_positions(positions, timeout=timedelta(seconds=30))
        found = measure(groups, sizes=SIZES, rounds=2, dropping=[(0.9, "bf16")])
        told: list[object] = [None] * 8
        dist.all_gather_object(told, found.to_dict())
        if any(each != told[0] for each in told):
            problems.append(f"{name}: ranks measured different networks")
        drops = ReductionScheme((LevelScheme(),) * (len(groups.names) - 1) + (LevelScheme(wire="bf16", drop=0.9),))
        for scheme in (ReductionScheme((LevelScheme(),) * len(groups.names)), drops):
            if not 0 < predict(found, scheme, 1 << 20) < 60:
                problems.append(f"{name}: {scheme} takes {predict(found, scheme, 1 << 20)} s")
        reducer = HierarchicalReducer(groups, scheme_table(found), debug=True)
        check_reducer(reducer, length=1000)
        levels = ReductionScheme((LevelScheme(),) * len(groups.names), 4096)
        reducer.set_scheme(SchemeTable(((0, ReductionScheme()), (1 << 14, levels))))
        for length, sent in ((1000, False), (5000, True)):
            before = sum(reducer.sent_bytes)
            reducer.all_reduce(torch.ones(length))
            if (sum(reducer.sent_bytes) > before) != sent:
                problems.append(f"{name}: {length} numbers went {'flat' if sent else 'over the levels'}")
        reducer.close()
        dist.barrier()
        groups.close()


CASES = {"measured": measured}
