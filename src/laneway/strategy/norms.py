"""The norm of all gradients of a job whose tensors are split in different ways: every element counts once."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from laneway.core import LanewayError

__all__ = ["clip", "local", "split_axes", "total_norm"]


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a split tensor; the tensor itself where it is not."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def split_axes(tensor: Tensor) -> tuple[str, ...]:
    """The mesh axes over which a tensor is split. On the others each rank has the same."""
    if not isinstance(tensor, DTensor):
        return ()
    names = tensor.device_mesh.mesh_dim_names or ()
    if any(placement.is_partial() for placement in tensor.placements):
        raise LanewayError("a gradient is not reduced yet: its norm is known after the last micro-batch of a step")
    return tuple(name for name, placement in zip(names, tensor.placements, strict=True) if not placement.is_replicate())


def total_norm(gradients: Iterable[Tensor], mesh: DeviceMesh | None, also: tuple[str, ...] = ()) -> Tensor:
    """The 2-norm over all ranks' gradients, in fp32, the same on every rank.

    Args:
        gradients: of this rank; a tensor that is whole on several ranks counts once.
        mesh: with the axes that the gradients are split over; None in a job of one process.
        also: axes along which ranks have different parameters (pp).
    """
    groups: dict[tuple[str, ...], list[Tensor]] = {}
    for gradient in gradients:
        groups.setdefault(split_axes(gradient), []).append(local(gradient))
    squares = {axes: _squares(tensors) for axes, tensors in groups.items()}
    if mesh is None:
        return torch.sqrt(sum(squares.values(), torch.zeros(())))
    # A rank may have no gradient that is split so: the kinds are those of the mesh, not of this rank's tensors.
    device = next((tensor.device for tensor in squares.values()), torch.device(mesh.device_type))
    kinds = [(), ("tp",), ("dp_shard",), ("dp_shard", "tp")]
    if stray := set(squares) - set(kinds):
        raise LanewayError(f"a gradient is split over {stray.pop()}; known: " + ", ".join(map(str, kinds)))
    sums = torch.stack([squares.get(kind, torch.zeros((), device=device)).to(device) for kind in kinds])
    for axis in ("tp", "dp_shard"):
        mine = torch.tensor([axis in kind for kind in kinds], device=device)
        sums = torch.where(mine, _sum_over(sums, mesh, axis), sums)
    total = sums.sum()
    for axis in also:
        total = _sum_over(total, mesh, axis)
    return total.sqrt()


@torch.no_grad()
def clip(parameters: Iterable[nn.Parameter], most: float, norm: Tensor) -> None:
    """Scale the gradients so that their norm is at most ``most``, as ``clip_grads_with_norm_`` does."""
    factor = torch.clamp(most / (norm + 1e-6), max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            local(parameter.grad).mul_(factor.to(local(parameter.grad)))


def _squares(tensors: list[Tensor]) -> Tensor:
    norms = torch._foreach_norm([tensor.float() for tensor in tensors])
    return torch.stack(norms).square().sum()


def _sum_over(value: Tensor, mesh: DeviceMesh, axis: str) -> Tensor:
    if mesh[axis].size() == 1:
        return value
    value = value.clone()
    torch.distributed.all_reduce(value, group=mesh.get_group(axis))
    return value
