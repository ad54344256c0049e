"""What can be reduced, on which groups, and whether all ranks ask for the same."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laneway.cluster.decisions import digest
from laneway.cluster.reduce.groups import LevelGroups
from laneway.cluster.reduce.scheme import ReductionScheme
from laneway.core import InputError, LanewayError

__all__ = ["agree", "check_scheme", "matching", "summable", "vector"]

SUMMABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_scheme(scheme: ReductionScheme, groups: LevelGroups) -> None:
    """Whether a scheme can be run on these groups.

    Raises:
        InputError: another number of levels, or a torus that doesn't fit a level.
    """
    if not isinstance(scheme, ReductionScheme):
        raise InputError("scheme", scheme, "a ReductionScheme")
    if scheme.flat:
        return
    if len(scheme.levels) != len(groups.names):
        raise InputError("scheme.levels", len(scheme.levels), f"{len(groups.names)} levels ({', '.join(groups.names)}), or none")
    for name, level, members in zip(groups.names, scheme.levels, groups.places.groups, strict=True):
        counts = sorted({len(group) for group in members})
        if level.algorithm == "torus" and counts != [math.prod(level.dims)]:
            there = " or ".join(map(str, counts))
            raise InputError(f"scheme.{name}.dims", level.dims, f"sizes that multiply to the level's members, {there}")


def vector(field: str, tensor: Tensor) -> Tensor:
    """A tensor as a 1-D view of its memory, without its history.

    Raises:
        InputError: no tensor, or one with gaps.
    """
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
        raise InputError(field, type(tensor).__name__, "a dense tensor")
    if not tensor.is_contiguous():
        raise InputError(field, f"shape {tuple(tensor.shape)} with strides {tensor.stride()}", "a contiguous tensor")
    return tensor.detach().view(-1)


def summable(field: str, tensor: Tensor) -> Tensor:
    """The same of a tensor whose numbers can be summed.

    Raises:
        InputError: as `vector`, or another type.
    """
    numbers = vector(field, tensor)
    if numbers.dtype not in SUMMABLE:
        raise InputError(field, numbers.dtype, "float16, bfloat16, float32 or float64")
    return numbers


def matching(large: Tensor, small: Tensor, world: int, field: str) -> None:
    """Whether one tensor holds as many parts as there are ranks of the size of the other.

    Raises:
        InputError: it doesn't, or the types differ.
    """
    if large.dtype != small.dtype:
        raise InputError(f"{field}.dtype", large.dtype, f"the other tensor's, {small.dtype}")
    if large.numel() != world * small.numel():
        raise InputError(field, large.numel(), f"{world} times the {small.numel()} elements of the other tensor")


def agree(group: dist.ProcessGroup, asked: Any, trouble: str) -> None:
    """Whether all ranks ask for the same, compared by its `repr`; a small collective.

    Raises:
        LanewayError: they don't.
    """
    told = digest(repr(asked))
    device = torch.device("cpu") if dist.get_backend(group) == "gloo" else torch.accelerator.current_accelerator()
    found = torch.tensor([told, -told], dtype=torch.int64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    most, least = found.tolist()
    if most != -least:
        raise LanewayError(trouble)
