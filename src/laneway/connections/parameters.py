"""What every map of the streams needs of its parameters: they stay wide, out of weight decay, and whole under FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

WIDE = (torch.float32, torch.float64)


class WideParameters(nn.Module):
    """A module whose parameters are never narrower than fp32: ``.to(bfloat16)`` and ``.half()`` move them and keep their dtype.

    The maps are 24 numbers a token, so fp32 costs nothing, and in bf16 the rows of H_res no longer sum to one.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        def keep_wide(t: Tensor) -> Tensor:
            if t.dtype not in WIDE:
                return fn(t)
            probe = fn(t.new_empty(0))
            return fn(t) if probe.dtype in WIDE else t.to(probe.device)

        return super()._apply(keep_wide, recurse)

    def require_wide(self, x: Tensor | None = None) -> None:
        """Raise TypeError where something (FSDP mixed precision, a direct assignment) did narrow the parameters.

        Streams x that are not floating point are refused too.
        """
        if x is not None and not x.is_floating_point():
            raise TypeError(f"x is {x.dtype}; accepted: a floating-point dtype")
        for name, parameter in self.named_parameters(recurse=False):
            if parameter.dtype not in WIDE:
                raise TypeError(
                    f"{type(self).__name__}.{name} is {parameter.dtype}; accepted: float32 or float64. Under FSDP mixed "
                    "precision call laneway.shard_connections(model, mesh) before sharding the blocks"
                )


def connections(model: nn.Module) -> list[WideParameters]:
    """All sites and read-outs of a model, in the order of its modules."""
    return [module for module in model.modules() if isinstance(module, WideParameters)]


def param_groups(model: nn.Module, weight_decay: float = 0.1) -> list[dict[str, Any]]:
    """Two optimizer groups: weight matrices with decay; maps, biases, scales, norms and embeddings without.

    Decay pulls H_res away from the identity and the reads towards uniform, which is no prior anyone wants; every parameter of
    a site or read-out is therefore left out, whatever its shape, as are all tensors with fewer than two dims.

    Raises:
        InputError: weight_decay < 0.
    """
    from laneway.core import InputError

    if not weight_decay >= 0:
        raise InputError("weight_decay", weight_decay, "a number ≥ 0")
    exempt = {
        id(p) for module in model.modules() if isinstance(module, WideParameters | nn.Embedding) for p in module.parameters()
    }
    decay, keep = [], []
    for parameter in model.parameters():
        if parameter.requires_grad:
            (keep if parameter.ndim < 2 or id(parameter) in exempt else decay).append(parameter)
    groups = [{"params": decay, "weight_decay": weight_decay}, {"params": keep, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def shard_connections(model: nn.Module, mesh: Any = None, **options: Any) -> nn.Module:
    """FSDP2 for the sites: shards each with fp32 parameters and fp32 reduction, whatever the blocks around it use.

    Call it before ``fully_shard`` of the blocks; ``options`` go to ``fully_shard``. FSDP would otherwise cast the maps to
    the blocks' ``param_dtype``, which ``HyperConnection`` refuses.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=None, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in connections(model):
        if any(True for _ in module.parameters(recurse=False)):
            fully_shard(module, mesh=mesh, mp_policy=policy, **options)
    return model
