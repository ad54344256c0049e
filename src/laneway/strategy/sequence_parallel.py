"""Tokens between the split sub-layers divided over the tp axis: each rank keeps the streams of its part of the sequence.

What has whole weights and works on a part of the tokens (norms, sites, read-out) sees a part of its gradient. Parts are summed
where the weights are used, inside the graph, so gradients are whole however the backward pass is called.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from laneway.connections.parameters import WideParameters
from laneway.core import InputError
from laneway.models.gpt import RMSNorm

__all__ = ["sum_gradients_of_parts"]


class _SumOver(torch.autograd.Function):
    """Identity whose gradients are summed over a group, all of them in one all-reduce a dtype."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(weight.view_as(weight) for weight in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyrefly: ignore[bad-override]
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(flat, group=ctx.group)
        parts = flat.split([grad.numel() for grad in grads])
        return None, *(part.view_as(grad) for part, grad in zip(parts, grads, strict=True))


class _Use:
    """Hooks around a module's forward pass, within which its weights are those of ``_SumOver``."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.own: dict[str, Any] = {}

    def begin(self, module: nn.Module, args: Any) -> None:
        self.own = {name: weight for name, weight in module._parameters.items() if weight is not None}
        if not torch.is_grad_enabled() or not any(weight.requires_grad for weight in self.own.values()):
            self.own = {}
            return
        used: Any = _SumOver.apply(self.group, *self.own.values())
        module._parameters.update(zip(self.own, used, strict=True))

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        module._parameters.update(self.own)
        self.own = {}


class _Even:
    """Refuses tokens [b, t] whose t does not divide by the ranks."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if args[0].ndim == 2 and args[0].shape[1] % self.ranks:
            raise InputError("tokens", list(args[0].shape), f"[b, t] with t a multiple of tp = {self.ranks} (sequence_parallel)")


def sum_gradients_of_parts(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Put the hooks on all norms, sites and read-outs. Before FSDP2, whose hooks must be the outer ones.

    Raises:
        InputError: (in a forward pass) the ranks do not divide the sequence.
    """
    model.register_forward_pre_hook(_Even(dist.get_world_size(group)))
    for module in model.modules():
        if isinstance(module, RMSNorm | WideParameters) and any(True for _ in module.parameters(recurse=False)):
            use = _Use(group)
            module.register_forward_pre_hook(use.begin)
            module.register_forward_hook(use.end, always_call=True)
