"""PowerSGD (Vogels et al., arXiv 1905.13727) as torch has it, as another way to send less: low-rank gradients over all ranks.

torch's state goes by bucket number and is lost, or belongs to other parameters, where a run goes on: DDP builds its buckets anew
after the first step. Here errors are saved by parameter, and the first two steps of a run, resumed or not, are plain all-reduces.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from laneway.core import InputError, LanewayError, positive_int

__all__ = ["PowerSGD"]

REBUILT = 2
"""From this step on DDP's buckets stay as they are."""


class PowerSGD:
    """Averages a DDP model's gradients as low-rank products, with error feedback.

        powersgd = PowerSGD(DistributedDataParallel(model), rank=2)

    It is DDP's communication hook, of which there is one: not together with `HierarchicalReducer` or `GradientDropper`, and not
    for FSDP. A matrix of a × b entries sends 2 · rank · (a + b) entries instead of 2 · a · b where that is ``least_rate`` times
    fewer; other parameters are sent whole.

    Args:
        model: wrapped by DDP, without a hook.
        rank: of the products.
        start: plain all-reduces before the first product, steps ≥ 2.
        least_rate: how many times fewer entries a matrix must have to be sent as a product.

    Attributes:
        state: torch's.

    Raises:
        InputError: no DDP model, or a value out of range.
        LanewayError: the model has a hook already.
    """

    def __init__(self, model: DistributedDataParallel, *, rank: int = 1, start: int = 1000, least_rate: float = 2.0) -> None:
        if not isinstance(model, DistributedDataParallel):
            raise InputError("model", type(model).__name__, "a DistributedDataParallel: this is a hook of its buckets")
        positive_int("rank", rank)
        positive_int("start", start, REBUILT)
        if isinstance(least_rate, bool) or not isinstance(least_rate, int | float) or not 1 <= least_rate < float("inf"):
            raise InputError("least_rate", least_rate, "a number ≥ 1")
        self.state = PowerSGDState(model.process_group, rank, start, min_compression_rate=least_rate)
        self._names = {id(parameter): name for name, parameter in model.module.named_parameters()}
        self._buckets: dict[int, list[tuple[str, int]]] = {}
        self._loaded: dict[str, Tensor] = {}
        self._step = 0
        try:
            model.register_comm_hook(self, lambda powersgd, bucket: powersgd.reduce(bucket))
        except RuntimeError as error:
            raise LanewayError(f"the model has a communication hook already, and DDP takes one: {error}") from error

    def state_dict(self) -> dict[str, Any]:
        """Errors by parameter (of this rank alone), step and generator. Low-rank factors are not kept: they begin anew."""
        errors = {name: error.clone() for name, error in self._loaded.items()}
        for number, error in self.state.error_dict.items():
            bucket = self._buckets[number]
            parts = error.split([numel for _, numel in bucket])
            errors |= {name: part.clone() for (name, _), part in zip(bucket, parts, strict=True)}
        return {"iter": self.state.iter, "rng": self.state.rng.get_state(legacy=False), "errors": errors}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on: two plain steps, in which DDP finds its buckets, and then products with the errors that were saved.

        Raises:
            InputError: no such state, or errors of other parameters.
        """
        if not isinstance(state, Mapping) or set(state) != {"iter", "rng", "errors"}:
            raise InputError("state", state if isinstance(state, str) else type(state).__name__, "what state_dict() gave")
        unknown = sorted(set(state["errors"]) - set(self._names.values()))
        if unknown:
            raise InputError("state.errors", unknown[0], "parameters of the model: " + ", ".join(self._names.values()))
        self.state.iter = state["iter"]
        self.state.rng.set_state(state["rng"])
        for memory in (self.state.error_dict, self.state.p_memory_dict, self.state.q_memory_dict):
            memory.clear()
        self._loaded = {name: error.clone() for name, error in state["errors"].items()}
        self._step = 0

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Average one bucket."""
        number, last = bucket.index(), bucket.is_last()
        self._buckets[number] = [(self._names[id(p)], p.numel()) for p in bucket.parameters()]
        plain = self._step < REBUILT
        self._step += last
        if plain:
            self.state.maybe_increase_iter(bucket)
            return allreduce_hook(self.state.process_group, bucket)
        if self._loaded and number not in self.state.error_dict and self.state.iter >= self.state.start_powerSGD_iter:
            buffer = bucket.buffer()
            parts = [self._loaded.pop(name, buffer.new_zeros(numel)) for name, numel in self._buckets[number]]
            self.state.error_dict[number] = torch.cat([part.to(buffer) for part in parts])
        return powerSGD_hook(self.state, bucket)
