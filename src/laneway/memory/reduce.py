"""Gradients averaged over the ranks after the backward pass, with the bits of DDP.

DDP reduces while the backward pass runs: where one rank runs out of memory in it, the others wait for ever. Here nobody
communicates before all have agreed that their micro-batches went through.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from laneway.core import LanewayError, positive_int
from laneway.memory.oom import Failure, free_unused, out_of_memory

BUCKET = 25 << 20  # bytes, DDP's


class Agreement:
    """Whether something failed on some rank: one all-reduce of one number, in memory that is there already.

    Args:
        device: of the number; one that the group can reduce.
        group: the ranks; None: all.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self._flag = torch.zeros((), dtype=torch.int32, device=device)

    def __call__(self, failed: bool) -> bool:
        """Tell the others, and hear. Every rank calls it; the same answer on each."""
        self._flag.fill_(int(failed))
        dist.all_reduce(self._flag, dist.ReduceOp.MAX, group=self.group)
        return bool(self._flag)


def reduce_gradients(model: nn.Module, group: dist.ProcessGroup | None = None, *, bucket_bytes: int = BUCKET) -> None:
    """Average ``p.grad`` of a model's parameters over the ranks of ``group``, in place, as DDP would have.

    As DDP does it: gradients lie one after the other in flat buckets (here one at a time, of one dtype), are multiplied by 1 over
    the number of ranks, summed by one all-reduce a bucket, and copied back. With two ranks the bits are DDP's; with more, the
    order of summation depends on where a gradient lies in its bucket. A parameter that has a gradient on some ranks only counts
    as zero on the others; one that has none anywhere keeps None.

    All memory is allocated before the first collective on gradients, and the ranks agree that each has it: none is left waiting.

    Args:
        model: bare, or in DDP under ``no_sync``.
        group: the ranks; None: all.
        bucket_bytes: of a bucket; a larger gradient has one of its own.

    Raises:
        LanewayError: a rank has no memory for its bucket (raised on every rank, gradients as they were), or a gradient is
            sparse or a DTensor.
    """
    positive_int("bucket_bytes", bucket_bytes)
    parameters = [p for p in model.parameters() if p.requires_grad]
    _refuse(parameters)
    ranks = dist.get_world_size(group)
    if ranks == 1 or not parameters:
        return
    buckets = list(_buckets(parameters, bucket_bytes))
    device = parameters[0].device
    room, failure = _room(parameters, buckets, device)
    if room is None:  # a last try at the only bytes that are needed to tell the others
        room = _Room([], {}, torch.zeros(len(parameters) + 1, dtype=torch.int32, device=device), {})
        room.votes[-1] = 1
    dist.all_reduce(room.votes, group=group)
    votes = room.votes.tolist()
    if votes.pop():
        raise LanewayError(
            f"out of memory for the buckets of {bucket_bytes} bytes that gradients are reduced in, on this rank or another; "
            "reduce bucket_bytes or the micro-batch"
        ) from (failure.error if failure is not None else None)
    for parameter, zeros in room.zeros:
        if votes[room.places[parameter]]:
            parameter.grad = zeros
    present = {p for p, count in zip(parameters, votes, strict=True) if count}
    for bucket in buckets:
        members = [p for p in bucket if p in present]
        if members:
            _reduce(members, room.flats[members[0].dtype], 1.0 / ranks, group)


class _Room:
    """All that a reduction allocates."""

    def __init__(
        self,
        zeros: list[tuple[nn.Parameter, Tensor]],
        flats: dict[torch.dtype, Tensor],
        votes: Tensor,
        places: dict[nn.Parameter, int],
    ) -> None:
        self.zeros, self.flats, self.votes, self.places = zeros, flats, votes, places


def _room(
    parameters: list[nn.Parameter], buckets: list[list[nn.Parameter]], device: torch.device
) -> tuple[_Room | None, Failure | None]:
    """Allocate it; a second time, with caches emptied, where that fails."""
    failure: Failure | None = None
    for _ in range(2):
        try:
            return _allocate(parameters, buckets, device), None
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            failure = Failure.of(error)
        free_unused(device)
    return None, failure


def _allocate(parameters: list[nn.Parameter], buckets: list[list[nn.Parameter]], device: torch.device) -> _Room:
    zeros = [(p, torch.zeros_like(p, requires_grad=False)) for p in parameters if p.grad is None]
    sizes: dict[torch.dtype, int] = {}
    for bucket in buckets:
        dtype = bucket[0].dtype
        sizes[dtype] = max(sizes.get(dtype, 0), sum(p.numel() for p in bucket))
    flats = {dtype: torch.empty(size, dtype=dtype, device=device) for dtype, size in sizes.items()}
    has = [int(p.grad is not None) for p in parameters]
    votes = torch.tensor([*has, 0], dtype=torch.int32, device=device)
    return _Room(zeros, flats, votes, {p: at for at, p in enumerate(parameters)})


def _buckets(parameters: list[nn.Parameter], bucket_bytes: int) -> Iterator[list[nn.Parameter]]:
    """Neighbours of one dtype, in the reverse order of the model, up to ``bucket_bytes`` together."""
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in reversed(parameters):
        nbytes = parameter.numel() * parameter.element_size()
        if bucket and (parameter.dtype != bucket[0].dtype or size + nbytes > bucket_bytes):
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += nbytes
    yield bucket


@torch.no_grad()
def _reduce(members: list[nn.Parameter], flat: Tensor, factor: float, group: dist.ProcessGroup | None) -> None:
    gradients = [p.grad for p in members if p.grad is not None]
    bounds, end = [], 0
    for gradient in gradients:
        bounds.append((end, end + gradient.numel()))
        end += gradient.numel()
    used = flat[:end]
    for gradient, (low, high) in zip(gradients, bounds, strict=True):
        used[low:high].view(gradient.shape).copy_(gradient)
    used.mul_(factor)
    dist.all_reduce(used, group=group)
    for gradient, (low, high) in zip(gradients, bounds, strict=True):
        gradient.copy_(used[low:high].view(gradient.shape))


def _refuse(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        if hasattr(parameter, "to_local"):
            raise LanewayError("reduce_gradients averages whole gradients; FSDP2 reduces its own, in the backward pass")
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise LanewayError("reduce_gradients can't average sparse gradients; make the embedding with sparse=False")
