"""What ranks of the lab do when one of them, or a link, is lost."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import torch

from laneway.bench.netlab import Context
from laneway.cluster.recover import LostContactError, Watch, rebuild
from laneway.cluster.reduce.groups import LevelGroups
from laneway.cluster.reduce.reducer import HierarchicalReducer
from laneway.cluster.reduce.scheme import LevelScheme, ReductionScheme


def reducer_over(positions: list[tuple[int, int]]) -> HierarchicalReducer:
    """Three levels in pieces, so that several stages are under way when a rank is lost."""
    scheme = ReductionScheme((LevelScheme(), LevelScheme(), LevelScheme()), chunk_bytes=1 << 18)
    return HierarchicalReducer(LevelGroups.from_positions(positions, timeout=timedelta(seconds=60)), scheme)


def lose(context: Context, victim: int, how: str, limit: float) -> dict[str, Any]:
    """Reduce over three levels until ``victim`` (or its host's link) is lost; regroup, and reduce over what is left."""
    context.start_gloo(seconds=60)
    watch = Watch.of_world(limit=limit)
    reducer = watch.watched(lambda: reducer_over(list(context.positions)))
    x = torch.ones(1 << 19)
    watch.watched(reducer.all_reduce, x)
    context.barrier()
    began = time.monotonic()
    if context.rank == 0:
        rack, host = context.positions[victim]
        act = {"kill": context.kill, "stop": context.stop}.get(how)
        threading.Timer(0.2, act or context.set_link, (victim,) if act else (f"r{rack}h{host}", False)).start()
    found: dict[str, Any] = {"kind": "nothing"}
    try:
        while time.monotonic() < began + 30:
            watch.watched(reducer.all_reduce, x.fill_(1.0))
    except LostContactError as error:
        found = {"kind": type(error).__name__, "text": str(error), "lost": [member.rank for member in error.lost]}
        found["seconds"] = time.monotonic() - began
    reducer.close(wait=False)
    try:
        rebuild(watch, patience=20)
        left = [context.positions[member.ident] for member in watch.members]
        again = watch.watched(lambda: reducer_over(left))
        y = torch.full((100_003,), float(2**context.rank))
        watch.watched(again.all_reduce, y)
    except LostContactError as error:
        return found | {"after": type(error).__name__}
    return found | {"after": "went on", "rank": watch.rank, "sums": y.unique().tolist(), "sizes": again.groups.sizes}
