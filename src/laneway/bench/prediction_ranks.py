"""What each rank of the lab does in ``laneway bench prediction``: measure with small messages, then time schemes at all sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from laneway.bench.netlab import Context
from laneway.cluster.drop import GradientDropper
from laneway.cluster.probe.measure import measure
from laneway.cluster.reduce.groups import LevelGroups
from laneway.cluster.reduce.reducer import HierarchicalReducer
from laneway.cluster.reduce.scheme import ReductionScheme

LIMIT_S = 120


@dataclass
class Found:
    """The measured network, and seconds by (scheme's name, bytes)."""

    network: dict[str, Any]
    seconds: dict[tuple[str, int], list[float]] = field(default_factory=dict)


def predict_and_time(
    context: Context,
    schemes: Mapping[str, Mapping[str, Any]],
    sizes: Sequence[int],
    rounds: int,
    probe_rounds: int,
    dropping: Sequence[tuple[float, str]],
) -> Found:
    """Measure before and after; between, all schemes at a size take turns."""
    context.start_gloo(LIMIT_S)
    groups = LevelGroups.from_positions(context.positions, timeout=timedelta(seconds=LIMIT_S))
    reducer = HierarchicalReducer(groups)
    reducer.dropper = GradientDropper()
    found = Found(measure(groups, rounds=probe_rounds, dropping=dropping).to_dict())
    known = {name: ReductionScheme.from_dict(scheme) for name, scheme in schemes.items()}
    for nbytes in sizes:
        source = torch.randn(nbytes // 4, generator=torch.Generator().manual_seed(context.rank))
        vector = torch.empty_like(source)

        def call(vector: torch.Tensor = vector) -> object:
            return reducer.all_reduce(vector, key="vector")

        names = list(known)
        for turn in range(rounds + 1):
            for name in (*names[turn % len(names) :], *names[: turn % len(names)]):
                vector.copy_(source)
                reducer.set_scheme(known[name])
                timed = context.timed(call)
                if turn:  # the first turn connects and makes workspaces
                    found.seconds.setdefault((name, nbytes), []).append(timed.seconds)
    context.barrier()
    reducer.close()
    groups.close()
    return found
