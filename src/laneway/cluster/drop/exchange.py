"""Messages of known sizes from member to member of a group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from laneway.core import LanewayError

__all__ = ["Members"]


class Members:
    """A group as its members see it.

    Args:
        group: of which this process is a member.
        device: where the messages lie; those of a gloo group go through the CPU's memory.

    Raises:
        LanewayError: this process is no member.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.ranks = dist.get_process_group_ranks(group)
        if dist.get_rank() not in self.ranks:
            raise LanewayError(f"rank {dist.get_rank()} is no member of the group of ranks {self.ranks}")
        self.place = self.ranks.index(dist.get_rank())
        self._staged = device.type != "cpu" and group._get_backend(device).name() == "gloo"

    def __len__(self) -> int:
        return len(self.ranks)

    def exchange(self, send: Sequence[Tensor | None], receive: Sequence[Tensor | None]) -> int:
        """Send to and receive from each member, all at once; None or no bytes: nothing.

        Receives are posted before sends: gloo tells a sender that it may go on over the same connection as the data, and
        behind a large message of its own that would wait.

        Args:
            send: uint8 by place of the receiver.
            receive: uint8 by place of the sender, of the size that the sender has.

        Returns: bytes sent.
        """
        out = [None if each is None or not each.numel() else each.cpu() if self._staged else each for each in send]
        into = [None if each is None or not each.numel() else self._room(each) for each in receive]
        turns = [(self.place + turn) % len(self) for turn in range(1, len(self))]
        calls = [dist.P2POp(dist.irecv, each, self.ranks[q], self.group) for q in turns[::-1] if (each := into[q]) is not None]
        calls += [dist.P2POp(dist.isend, each, self.ranks[q], self.group) for q in turns if (each := out[q]) is not None]
        if calls:
            for work in dist.batch_isend_irecv(calls):
                work.wait()
        for given, got in zip(receive, into, strict=True):
            if given is not None and got is not None and got is not given:
                given.copy_(got)
        return sum(each.numel() for q in turns if (each := out[q]) is not None)

    def _room(self, given: Tensor) -> Tensor:
        return torch.empty_like(given, device="cpu") if self._staged else given
