"""The ranks of a job as one ``DeviceMesh``: its groups are made once, in one order, on all ranks.

The axes are those of ``Layout``, outermost first: pp, dp_replicate, dp_shard, cp, tp. All five are there, whatever their sizes,
so that code which asks for an axis need not know whether it is in use. Place p of the row-major grid belongs to ``order[p]``.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from laneway.cluster.agree import agree_on_groups
from laneway.cluster.layout import Layout
from laneway.core import InputError, LanewayError

__all__ = ["AXES", "axis_sizes", "build_mesh", "check_world"]

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")

_made: weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], DeviceMesh]] = (
    weakref.WeakKeyDictionary()
)  # by the group of all ranks


def axis_sizes(layout: Layout) -> tuple[int, ...]:
    """Degrees in the order of ``AXES``."""
    return tuple(getattr(layout, axis) for axis in AXES)


def check_world(layout: Layout) -> int:
    """The number of processes, which must be what the layout needs; one where no process group was begun.

    Raises:
        LanewayError: another number, with what to do.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world == layout.world:
        return world
    degrees = " × ".join(f"{axis} {size}" for axis, size in zip(AXES, axis_sizes(layout), strict=True) if size > 1) or "1"
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if not dist.is_initialized() and started == layout.world:
        todo = "torchrun started them, but no process group was begun: call torch.distributed.init_process_group first"
    else:
        todo = f"start {layout.world} processes (torchrun --nproc-per-node …), or plan for {world}: strategy.scaled_to({world})"
    raise LanewayError(f"the plan needs {layout.world} processes ({degrees}), but {world} run; {todo}")


def build_mesh(layout: Layout, *, device_type: str = "cpu", order: Sequence[int] | None = None) -> DeviceMesh:
    """The mesh of a layout; the same object when called again with the same arguments.

    Args:
        layout: its degrees must multiply to the world size.
        device_type: of the tensors, "cpu" or "cuda".
        order: the rank at each place of the grid, tp innermost; None: rank = place. Groups keep this order, so the rings of
            collectives and the shards of tensors follow it.

    Raises:
        LanewayError: no process group, another world size, or ranks that ask for different meshes.
        InputError: ``order`` is no permutation of the ranks.
    """
    if not dist.is_initialized():
        raise LanewayError("a mesh needs a process group: call torch.distributed.init_process_group first")
    check_world(layout)
    ranks = _checked(order, layout.world)
    world, sizes = dist.group.WORLD, axis_sizes(layout)
    assert world is not None
    made, key = _made.setdefault(world, {}), (sizes, device_type, ranks)
    if key in made:
        return made[key]
    _agree(key, device_type)
    grid = torch.tensor(ranks, dtype=torch.int).reshape(sizes)
    mesh = DeviceMesh.from_group(
        [_make_axis(grid, axis) for axis in range(len(AXES))], device_type, mesh=grid, mesh_dim_names=AXES
    )
    made[key] = mesh
    return mesh


def _checked(order: Sequence[int] | None, world: int) -> tuple[int, ...]:
    ranks = tuple(range(world)) if order is None else tuple(order)
    if sorted(ranks) != list(range(world)):
        raise InputError("order", list(ranks), f"a permutation of the ranks 0 to {world - 1}")
    return ranks


def _agree(key: tuple[Any, ...], device_type: str) -> None:
    device = torch.device(device_type) if device_type == "cpu" else torch.accelerator.current_accelerator()
    assert device is not None
    agree_on_groups(key, device, "the ranks ask for different meshes: layout, device type or order of ranks differ")


def _make_axis(grid: torch.Tensor, axis: int) -> dist.ProcessGroup:
    """The groups along one axis, all of them on every rank; returns this rank's."""
    mine: Any = None
    here = dist.get_rank()
    lines = grid.movedim(axis, -1).reshape(-1, grid.shape[axis])
    for line in lines.tolist():
        group = dist.new_group(line, sort_ranks=False, group_desc=f"laneway_{AXES[axis]}")
        if here in line:
            mine = group
    assert mine is not None
    return mine
