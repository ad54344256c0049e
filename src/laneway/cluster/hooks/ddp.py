"""DistributedDataParallel's buckets over the levels: while one bucket is between racks, the next one is inside its host.

    reducer = HierarchicalReducer(LevelGroups.detect(), scheme)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    attach_ddp(ddp, reducer)

The hook is registered once, for good (DDP allows no second one); another scheme is the reducer's business: `set_scheme`, at the
same step on all ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from laneway.cluster.drop.pieces import PADDING, Piece, Pieces
from laneway.cluster.reduce.reducer import HierarchicalReducer
from laneway.core import InputError

__all__ = ["DDPReduction", "attach_ddp"]


class DDPReduction:
    """What the hook knows: the reducer, and which parameters lie where in a bucket.

    Each bucket is averaged over all ranks, asynchronously; the backward pass goes on. Accumulation with ``no_sync``, unused
    parameters and buckets that DDP builds anew after the first step are as without the hook. Where the reducer drops, residuals
    belong to parameters, and those that a new bucket puts on another rank are first added to this rank's own gradients.

    Args:
        model: the wrapped model.
        reducer: over the ranks of the model's process group.

    Raises:
        InputError: the model is reduced over other ranks than the reducer's.
    """

    def __init__(self, model: DistributedDataParallel, reducer: HierarchicalReducer) -> None:
        ranks = dist.get_process_group_ranks(model.process_group)
        if sorted(ranks) != list(range(reducer.groups.world)):
            raise InputError("model.process_group", ranks, f"all {reducer.groups.world} ranks, as the reducer has them")
        self.reducer = reducer
        self.names = {id(parameter): name for name, parameter in model.module.named_parameters()}
        self._layouts: dict[tuple[int, ...], Pieces] = {}

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Begin the average of one bucket; the future gives its buffer."""
        buffer, key = bucket.buffer(), None
        dropper: Any = self.reducer.dropper
        if dropper is not None:
            key = self._pieces(bucket)
            dropper.carry_into(buffer, key)
        return self.reducer.all_reduce(buffer, op="mean", key=key, async_op=True).future()

    def _pieces(self, bucket: dist.GradBucket) -> Pieces:
        parameters = bucket.parameters()
        known = tuple(map(id, parameters))
        if known not in self._layouts:
            self._layouts[known] = self._lay_out(bucket)
        return self._layouts[known]

    def _lay_out(self, bucket: dist.GradBucket) -> Pieces:
        """The bucket's parameters in the order of their gradients in its buffer; gaps are padding."""
        buffer = bucket.buffer()
        found: list[Piece] = []
        at = 0
        begin = int(buffer.storage_offset())
        places = [(int(gradient.storage_offset()) - begin, gradient.numel()) for gradient in bucket.gradients()]
        for (start, numel), parameter in sorted(zip(places, bucket.parameters(), strict=True), key=lambda pair: pair[0]):
            if start > at:
                found.append(Piece(PADDING, 0, start - at, start - at))
            if numel:
                found.append(Piece(self.names[id(parameter)], 0, numel, numel))
            at = start + numel
        if at < buffer.numel():
            found.append(Piece(PADDING, 0, buffer.numel() - at, buffer.numel() - at))
        return Pieces(tuple(found))


def attach_ddp(model: DistributedDataParallel, reducer: HierarchicalReducer) -> DDPReduction:
    """Let a reducer average the model's gradients from the next backward pass on.

    Raises:
        InputError: no DistributedDataParallel, or one over other ranks than the reducer's.
        RuntimeError: the model has a communication hook already.
    """
    if not isinstance(model, DistributedDataParallel):
        raise InputError("model", type(model).__name__, "a DistributedDataParallel")
    reduction = DDPReduction(model, reducer)
    model.register_comm_hook(reduction, _reduce_bucket)
    return reduction


def _reduce_bucket(state, bucket):  # DDP reads annotations as types, so none as text
    """The hook itself."""
    return state.reduce(bucket)
