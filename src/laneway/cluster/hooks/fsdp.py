"""FSDP2's gradients over the levels.

Two ways to shard, told apart by the mesh that ``fully_shard`` was given:

* over all ranks: reduce-scatter and all-gather go over the levels;
* over the ranks of each host (a mesh of the innermost level, ``host_mesh(groups)``): every host holds all parameters. The
  reduce-scatter stays inside the host, and each shard is then averaged with its like in other hosts. This is what two-dimensional
  meshes do with one flat all-reduce; here the scheme says how.

    groups = LevelGroups.detect()
    reducer = HierarchicalReducer(groups, scheme)
    for block in model.blocks:
        fully_shard(block, mesh=host_mesh(groups))
    fully_shard(model, mesh=host_mesh(groups))
    attach_fsdp(model, reducer)
"""

from __future__ import annotations

import math
import weakref
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from laneway.cluster.agree import agree_on_groups
from laneway.cluster.drop.pieces import PADDING, Piece, Pieces
from laneway.cluster.reduce.groups import LevelGroups
from laneway.cluster.reduce.reducer import HierarchicalReducer
from laneway.core import InputError, LanewayError

__all__ = ["attach_fsdp", "host_mesh"]

_made: weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], DeviceMesh]] = (
    weakref.WeakKeyDictionary()
)  # by the group of all ranks


def host_mesh(groups: LevelGroups, device_type: str = "cpu") -> DeviceMesh:
    """The ranks of this host as a one-dimensional mesh for ``fully_shard``; the same object when called again.

    It has process groups of its own, which outlive ``groups``. All ranks must call it.

    Raises:
        InputError: hosts of different sizes, whose shards could not be averaged with each other.
    """
    if groups.places.ragged:
        raise InputError("groups", groups.sizes, "groups of one size at each level")
    hosts, world = groups.places.groups[0], dist.group.WORLD
    made, key = _made.setdefault(world, {}), (hosts, device_type)
    if key not in made:
        agree_on_groups(hosts, torch.device(device_type), "the ranks ask for meshes of different hosts")
        every: list[Any] = [dist.new_group(list(ranks), timeout=groups.timeout, sort_ranks=False) for ranks in hosts]
        own = every[hosts.index(groups.ranks[0])]
        made[key] = DeviceMesh.from_group(own, device_type, mesh_dim_names=("host",))
    return made[key]


def attach_fsdp(model: nn.Module, reducer: HierarchicalReducer) -> list[FSDPModule]:
    """Let a reducer carry gradients (and, where all ranks share one copy, parameters) from the next pass on.

    Accumulation is as without: with ``set_requires_gradient_sync(False)`` nothing is reduced, with
    ``set_requires_all_reduce(False)`` shards stay inside the host until the last micro-batch. Gradients are averaged over all
    ranks, divided once.

    Args:
        model: sharded by ``fully_shard``, blocks and root, on one kind of mesh.
        reducer: of all ranks.

    Returns:
        The modules that it serves.

    Raises:
        InputError: nothing is sharded; a two-dimensional mesh; a mesh that is neither all ranks nor those of a host.
    """
    modules: list[FSDPModule] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        raise InputError("model", type(model).__name__, "a model that fully_shard was called on")
    for module in modules:
        for group in _param_groups(module):
            _check_mesh(group, reducer)
    for module in modules:
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
        for group in _param_groups(module):
            if group._reduce_scatter_process_group.size() == reducer.groups.world:
                module.set_custom_reduce_scatter(cast("Any", _Everywhere(reducer)))
                module.set_custom_all_gather(cast("Any", _Gather(reducer)))
            else:
                outer = _Outer(reducer, group)
                module.set_custom_reduce_scatter(cast("Any", _Inside(reducer, outer)))
                module.set_all_reduce_hook(outer)
    return modules


def _param_groups(module: FSDPModule) -> list[Any]:
    return list(module._get_fsdp_state()._fsdp_param_groups)


def _check_mesh(group: Any, reducer: HierarchicalReducer) -> None:
    mesh, groups = group.mesh_info.mesh, reducer.groups
    if mesh.ndim != 1:
        raise InputError("model.mesh", tuple(mesh.shape), "a mesh of one dimension; replicas in other hosts are the reducer's")
    ranks = tuple(dist.get_process_group_ranks(group._reduce_scatter_process_group))
    if ranks not in (tuple(range(groups.world)), groups.ranks[0]):
        accepted = f"all ranks in order, or those of this host, {groups.ranks[0]}"
        raise InputError("model.mesh", ranks[:16], accepted, "host_mesh(groups) makes the latter")
    if groups.places.ragged and len(ranks) < groups.world:
        raise InputError("groups", groups.sizes, "groups of one size at each level")


class _Buffers:
    """Where FSDP2 takes its buffers from."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Everywhere(_Buffers):
    """Reduce-scatter over all ranks, averaged."""

    def __init__(self, reducer: HierarchicalReducer) -> None:
        self.reducer = reducer

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        found = self.reducer.reduce_scatter(output_tensor, input_tensor, op="mean", async_op=async_op)
        return found if async_op else None


class _Gather(_Buffers):
    """All-gather over all ranks."""

    def __init__(self, reducer: HierarchicalReducer) -> None:
        self.reducer = reducer

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        found = self.reducer.all_gather(output_tensor, input_tensor, async_op=async_op)
        return found if async_op else None


class _Outer:
    """The hook after the reduce-scatter: this rank's shard and its like in other hosts.

    Args:
        reducer: of all ranks.
        group: FSDP2's own record of the parameters that are reduced together.
    """

    def __init__(self, reducer: HierarchicalReducer, group: Any) -> None:
        self.reducer, self.group = reducer, group
        self.partial: Tensor | None = None
        self._layouts: dict[str, Pieces] = {}

    def __call__(self, shard: Tensor) -> None:
        """Average, in place; or keep it for the last micro-batch and hand on zeros."""
        if self.partial is not None and self.partial.shape != shard.shape:
            raise LanewayError(
                "micro-batches of one step gave gradients to different parameters: accumulate with "
                "set_requires_gradient_sync(False) instead of set_requires_all_reduce(False)"
            )
        if not self.group.all_reduce_grads:
            self.partial = shard.clone() if self.partial is None else self.partial.add_(shard)
            shard.zero_()
            return
        if self.partial is not None:
            shard.add_(self.partial)
            self.partial = None
        self.reducer.all_reduce(shard, op="mean", key=self._key(shard.numel()), first=1)

    def carry_into(self, given: Tensor) -> None:
        """Residuals of which this rank no longer holds the shard, into its own gradients of all shards."""
        dropper: Any = self.reducer.dropper
        members = self.group._reduce_scatter_process_group.size()
        if dropper is None or not self.group.all_reduce_grads:
            return
        shards = [self._shard(member) for member in range(members)]
        whole = Pieces(tuple(piece for shard in shards for piece in shard.pieces))
        if whole.numel == given.numel():
            dropper.carry_into(given, whole)

    def _key(self, numel: int) -> Pieces | str | None:
        """What lies in this rank's shard. Where only some parameters had gradients, which ones isn't known: a name of its own."""
        if self.reducer.dropper is None:
            return None
        own = self._shard(self.group._reduce_scatter_process_group.rank())
        return own if own.numel == numel else f"{self.group._module_fqn or 'root'}: {numel} of {own.numel} entries"

    def _shard(self, member: int) -> Pieces:
        """A member's shard of every parameter, one after the other, with FSDP2's padding."""
        name = str(member)
        if name not in self._layouts:
            members = self.group._reduce_scatter_process_group.size()
            found = [piece for parameter in self.group.fsdp_params for piece in _rows(parameter, member, members)]
            self._layouts[name] = Pieces(tuple(found))
        return self._layouts[name]


class _Inside(_Buffers):
    """Reduce-scatter within the host, summed."""

    def __init__(self, reducer: HierarchicalReducer, outer: _Outer) -> None:
        self.reducer, self.outer = reducer, outer

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> None:
        self.outer.carry_into(input_tensor)
        self.reducer.scatter_inside(output_tensor, input_tensor)


def _rows(parameter: Any, member: int, members: int) -> list[Piece]:
    """One member's rows of a parameter."""
    name, shape = parameter._param_fqn, tuple(parameter._orig_size)
    numel, length = math.prod(shape), shape[0] if shape else 1
    dim = parameter.fsdp_placement.dim
    if dim != 0:
        each = numel // members
        return [Piece(f"{name} by dim {dim}", member * each, (member + 1) * each, numel)]
    row, chunk = numel // max(length, 1), -(-length // members)
    first, last = min(member * chunk, length), min((member + 1) * chunk, length)
    found = [Piece(name, first * row, last * row, numel)] if last > first and row else []
    padding = (chunk - (last - first)) * row
    return found + ([Piece(PADDING, 0, padding, padding)] if padding else [])
