"""Split models seen whole: their weights under the plain model's names, and optimizer groups of tensors that go together."""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from laneway.cluster.layout import Layout
from laneway.connections import param_groups

__all__ = ["full_state", "groups_of"]

PART = re.compile(r"^(.*\.(?:qkv|gate_up))\.(\d+)\.(weight|bias)$")  # of a SplitLinear


def full_state(state: dict[str, Any], mesh: DeviceMesh | None, layout: Layout) -> dict[str, Tensor]:
    """Whole tensors on the CPU, by the names that the plain model has; with stages, those of all of them."""
    whole = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            value = value.full_tensor() if isinstance(value, DTensor) else value
            whole[name] = value.detach().to("cpu", copy=True)
    whole = _joined(whole)
    if mesh is None or layout.pp == 1:
        return whole
    parts: list[dict[str, Tensor]] = [{}] * layout.pp
    dist.all_gather_object(parts, whole, group=mesh.get_group("pp"))
    return {name: value for part in parts for name, value in part.items()}


def _joined(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Projections that tensor parallelism took apart, side by side again."""
    found: dict[str, list[Tensor]] = {}
    for name, value in state.items():
        part = PART.match(name)
        found.setdefault(f"{part[1]}.{part[3]}" if part else name, []).append(value)
    return {name: values[0] if len(values) == 1 else torch.cat(values) for name, values in found.items()}


def groups_of(model: nn.Module, weight_decay: float, undecayed: set[int]) -> list[dict[str, Any]]:
    """``param_groups``, divided by how tensors are split. Parameters in ``undecayed`` have no decay."""
    found: dict[tuple[float, object], list[nn.Parameter]] = {}
    for group in param_groups(model, weight_decay):
        for parameter in group["params"]:
            decay = 0.0 if id(parameter) in undecayed else group["weight_decay"]
            split = parameter.device_mesh if isinstance(parameter, DTensor) else None
            found.setdefault((decay, split), []).append(parameter)
    return [{"params": parameters, "weight_decay": decay} for (decay, _), parameters in found.items()]
