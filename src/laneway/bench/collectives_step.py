"""What every rank of the lab does for ``ddp_step``: forward and backward of a model, with gradients averaged in several ways."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from laneway.bench.netlab import Context
from laneway.cluster.drop.dropper import GradientDropper
from laneway.cluster.hooks import attach_ddp
from laneway.cluster.reduce.groups import LevelGroups
from laneway.cluster.reduce.reducer import HierarchicalReducer
from laneway.cluster.reduce.scheme import ReductionScheme
from laneway.models.gpt import GPT, GPTConfig

__all__ = ["ALONE", "PLAIN", "MeasuredSteps", "measure_steps"]

ALONE, PLAIN = "alone", "ddp"
"""Every rank by itself, with no communication; DDP as it is."""
LIMIT_S = 120.0
BUCKET_MB = 4.0
BATCH = 2
WARMUP = 3
"""DDP makes its buckets anew after the first step."""


@dataclass
class MeasuredSteps:
    """Seconds and bytes on each link by variant; error: of the gradient against plain DDP's, as a share of its norm."""

    parameters: int = 0
    seconds: dict[str, list[float]] = field(default_factory=dict)
    nbytes: dict[str, dict[str, int]] = field(default_factory=dict)
    error: dict[str, float] = field(default_factory=dict)


def measure_steps(
    context: Context, shape: Mapping[str, int], schemes: Mapping[str, Mapping[str, Any]], seconds: float, rounds: tuple[int, int]
) -> MeasuredSteps:
    """Time steps alone, with plain DDP and with each scheme, in turns.

    Args:
        shape: layers, dim, heads and context of a GPT with plain residuals.
        schemes: of the variants, as ``to_dict`` wrote them.
        seconds: budget of the rounds.
        rounds: least and most.
    """
    context.start_gloo(LIMIT_S)
    steps = _Steps(context, shape, schemes)
    names = [ALONE, PLAIN, *schemes]
    found = MeasuredSteps(sum(p.numel() for p in steps.models[ALONE].parameters()), {name: [] for name in names})
    for _ in range(WARMUP):
        for name in names:
            steps.prepared(name)()
    found.error = steps.errors(names)
    spent = 0.0
    for done in range(rounds[1]):
        if done >= rounds[0] and spent + spent / done > seconds:
            break
        shift = done % len(names)
        for name in (*names[shift:], *names[:shift]):
            timed = context.timed(steps.prepared(name))
            found.seconds[name].append(timed.seconds)
            found.nbytes[name] = timed.nbytes
            spent += timed.seconds
    steps.close()
    return found


class _Steps:
    """One model without communication, one under DDP, one under DDP with the reducer; same weights, same batch."""

    def __init__(self, context: Context, shape: Mapping[str, int], schemes: Mapping[str, Mapping[str, Any]]) -> None:
        self.context = context
        self.schemes = {name: ReductionScheme.from_dict(scheme) for name, scheme in schemes.items()}
        self.levels = LevelGroups.from_positions(context.positions, timeout=timedelta(seconds=LIMIT_S))
        self.reducer = HierarchicalReducer(self.levels)
        self.models = {name: self._model(shape) for name in (ALONE, PLAIN, "levels")}
        self.wrapped: dict[str, nn.Module] = {ALONE: self.models[ALONE]}
        for name in (PLAIN, "levels"):
            self.wrapped[name] = DistributedDataParallel(self.models[name], bucket_cap_mb=BUCKET_MB, gradient_as_bucket_view=True)
        reduced = self.wrapped["levels"]
        assert isinstance(reduced, DistributedDataParallel)
        attach_ddp(reduced, self.reducer)
        draw = torch.Generator().manual_seed(context.rank)
        self.tokens = torch.randint(0, 256, (BATCH, shape["context"] + 1), generator=draw)

    @staticmethod
    def _model(shape: Mapping[str, int]) -> GPT:
        torch.manual_seed(0)
        return GPT(GPTConfig(residual="residual", streams=1, **shape))

    def _home(self, name: str) -> str:
        return name if name in (ALONE, PLAIN) else "levels"

    def prepared(self, name: str) -> Callable[[], None]:
        """A step's forward and backward; the scheme is set, gradients are zero."""
        home = self._home(name)
        if home == "levels":
            scheme = self.schemes[name]
            outer = scheme.levels[-1]
            if outer.drop and self.reducer.dropper is None:
                self.reducer.dropper = GradientDropper(outer.drop, wire=outer.wire)
            self.reducer.set_scheme(scheme)
        model = self.wrapped[home]
        model.zero_grad()

        def step() -> None:
            logits = model(self.tokens[:, :-1])
            F.cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten()).backward()

        return step

    def errors(self, names: Sequence[str]) -> dict[str, float]:
        """One step each, and how far its gradients are from plain DDP's; the largest over the ranks."""
        self.prepared(PLAIN)()
        exact = self._gradient(PLAIN)
        found = {}
        for name in names:
            if name not in (ALONE, PLAIN):
                self.prepared(name)()
                off = float((self._gradient(name) - exact).norm() / exact.norm())
                found[name] = max(self.context.gather(off))
        return found

    def _gradient(self, name: str) -> Tensor:
        gradients = [parameter.grad for parameter in self.models[self._home(name)].parameters()]
        return torch.cat([gradient.double().flatten() for gradient in gradients if gradient is not None])

    def close(self) -> None:
        """Threads and groups."""
        self.context.barrier()
        self.reducer.close()
        self.levels.close()
