"""One level as one rank sees it: messages to and from the other members, and a count of the bytes that it sends."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from laneway.cluster.reduce.buffers import Scratch

__all__ = ["Link", "Messages", "all_gather_single", "reduce_scatter_single"]

Messages = Sequence[tuple[int, Tensor]]
"""Members (by their index in the group) and what goes to or comes from each: 1-D contiguous tensors of any type."""


class Link:
    """This rank's end of a group. Used by one thread at a time.

    Args:
        group: two members or more.
        ranks: of the members, in the group's order.
        rank: this one's.

    Attributes:
        size, index: number of members, and this one's place among them.
        sent: bytes that this rank sent: what its own messages hold, and for collectives of the backend what those of the fewest
            bytes send.
        scratch: workspaces of the thread that uses the link.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], rank: int) -> None:
        self.group, self.ranks = group, tuple(ranks)
        self.size, self.index = len(self.ranks), self.ranks.index(rank)
        self.sent = 0
        self.scratch = Scratch()

    def exchange(self, sends: Messages, receives: Messages) -> None:
        """Send and receive all of these at once; empty ones don't travel.

        On gloo every receive is posted before the first send: gloo announces "ready to receive" on the connection that carries
        the payload, so that an announcement posted later waits behind a large send and the link turns half duplex. On other
        backends the messages are one batch, as NCCL needs it.
        """
        sends = [(peer, tensor) for peer, tensor in sends if tensor.numel()]
        receives = [(peer, tensor) for peer, tensor in receives if tensor.numel()]
        self.sent += sum(tensor.nbytes for _, tensor in sends)
        if not (sends or receives):
            return
        first = (sends or receives)[0][1]
        if first.device.type == "cpu":
            works = [dist.irecv(tensor, group=self.group, group_src=peer) for peer, tensor in receives]
            works += [dist.isend(tensor, group=self.group, group_dst=peer) for peer, tensor in sends]
        else:
            batch = [dist.P2POp(dist.irecv, tensor, group=self.group, group_peer=peer) for peer, tensor in receives]
            batch += [dist.P2POp(dist.isend, tensor, group=self.group, group_peer=peer) for peer, tensor in sends]
            works = dist.batch_isend_irecv(batch)
        for work in works:
            if work is not None:
                work.wait()

    def peers(self) -> list[int]:
        """The other members, nearest first: each member starts with another one."""
        return [(self.index + step) % self.size for step in range(1, self.size)]

    def native_all_reduce(self, numbers: Tensor) -> None:
        """The backend's own sum over the group, in place."""
        dist.all_reduce(numbers, group=self.group)
        self.sent += 2 * (self.size - 1) * numbers.nbytes // self.size

    def native_scatter(self, numbers: Tensor, own: Tensor) -> bool:
        """The backend's own reduce-scatter of equal parts, where it is a good one; returns whether it was done.

        gloo's moves as many bytes as an all-reduce, so that it isn't used.
        """
        if numbers.device.type == "cpu" or numbers.numel() != own.numel() * self.size or numbers.dtype != own.dtype:
            return False
        result = self.scratch.get("scattered", own.numel(), own.dtype, own.device)
        reduce_scatter_single(result, numbers, group=self.group)
        own.copy_(result)
        self.sent += (self.size - 1) * own.nbytes
        return True

    def native_exchange(self, out: Tensor, into: Tensor, sends: list[int], receives: list[int]) -> None:
        """The backend's own all-to-all: parts of `out` of these lengths to each member, and theirs into `into`."""
        dist.all_to_all_single(into, out, receives, sends, group=self.group)
        self.sent += out.nbytes - sends[self.index] * out.itemsize

    def native_gather(self, whole: Tensor, own: Tensor) -> None:
        """The backend's own all-gather of equal parts, into `whole`, of which `own` may be this rank's part."""
        mine = self.scratch.get("gathered", own.numel(), own.dtype, own.device)
        mine.copy_(own)
        all_gather_single(whole, mine, group=self.group)
        self.sent += (self.size - 1) * own.nbytes


# torch 2.13 names these anew and warns of the old names.
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
