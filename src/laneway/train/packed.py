"""All the numbers that ranks share in a step, in one collective: the loss, the request to stop, the statistics of extensions.

A vector has a name, a fixed size and a way of being reduced. All of them lie one behind the other in one fp32 vector, whose sum
over the ranks starts when the last backward pass has ended and is waited for where its first value is needed. What takes a
maximum, or is wanted rank by rank, has a place for each rank, zero on the others: the sum leaves it exact.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laneway.core import InputError, LanewayError, choice, positive_int

__all__ = ["OPS", "SharedStatistics"]

OPS = ("sum", "max", "gather")
_IDLE = {"sum": 0.0, "max": float("-inf"), "gather": float("nan")}  # what a rank gives that gives nothing


@dataclass(frozen=True)
class _Entry:
    """Where a vector lies: ``size`` numbers from ``begin`` on, or that many for each rank."""

    begin: int
    size: int
    op: str
    places: int

    @property
    def end(self) -> int:
        return self.begin + self.size * self.places


class SharedStatistics:
    """Named fp32 vectors, reduced over the ranks together, once a step.

    Use: ``add`` every vector on every rank, in one order; then in each step ``put`` values, ``start`` and ``finish``. From
    ``finish`` on, until the next one, ``get`` returns the values of that step. In a run the loop calls ``start`` and ``finish``:
    an extension that puts values before ``on_backward_end`` is over finds them reduced when the next step begins.

    Args:
        device: where the vector lies; the process group must be able to reduce there.
        rank: this process's place.
        world_size: the number of ranks; 1 needs no process group.
        group: the ranks, by default all.

    Raises:
        InputError: a number out of range.
    """

    def __init__(
        self, device: torch.device | str, rank: int = 0, world_size: int = 1, group: dist.ProcessGroup | None = None
    ) -> None:
        self.device, self.world_size, self.group = torch.device(device), positive_int("world_size", world_size), group
        if positive_int("rank", rank, 0) >= world_size:
            raise InputError("rank", rank, f"an integer from 0 to {world_size - 1}")
        self.rank, self.sealed = rank, False
        self._entries: dict[str, _Entry] = {}
        self._length = 0
        self._idle = self._filling = torch.empty(0)
        self._flying: tuple[Tensor, dist.Work | None] | None = None
        self._latest: Tensor | None = None
        self._restored: dict[str, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the vector that is reduced."""
        return 4 * self._length

    def add(self, name: str, size: int = 1, op: str = "sum") -> None:
        """Make room for a vector.

        Args:
            name: must be new.
            size: numbers in it, ≥ 1.
            op: ``sum`` or ``max`` over the ranks, or ``gather``: every rank's own. The last two send ``size`` numbers for each
                rank, so they are for a few numbers.

        Raises:
            InputError: a name that is taken, a size or an op that there is not.
            LanewayError: a step has begun already.
        """
        if self.sealed:
            raise LanewayError(f"statistics {name!r}: vectors are added before the first step, on all ranks alike")
        if name in self._entries:
            raise InputError("name", name, "a name that no other statistics have", "taken: " + ", ".join(self._entries))
        places = 1 if choice("op", op, OPS) == "sum" else self.world_size
        entry = self._entries[name] = _Entry(self._length, positive_int("size", size), op, places)
        self._length = entry.end

    def seal(self) -> None:
        """Nothing is added any more. All ranks call it: they make sure that they have added the same. Otherwise ``start`` does.

        Raises:
            LanewayError: on every rank, where two have added other vectors.
        """
        if self.sealed:
            return
        self._agree()
        self.sealed = True
        self._idle = torch.zeros(self._length, device=self.device)
        for entry in self._entries.values():
            self._own(self._idle, entry).fill_(_IDLE[entry.op])
        self._filling = self._idle.clone()

    def put(self, name: str, values: float | Sequence[float] | Tensor) -> None:
        """This rank's values for the reduction that starts next; what was put before is replaced.

        Raises:
            InputError: an unknown name, or another number of values than was added.
        """
        self.seal()
        entry = self._entries[choice("name", name, self._entries)]
        given = values.detach() if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.float32)
        if given.numel() != entry.size:
            raise InputError(f"statistics {name!r}", f"{given.numel()} values", f"{entry.size}, as was added")
        self._own(self._filling, entry).copy_(given.reshape(-1), non_blocking=True)

    def start(self) -> None:
        """Send what was put off; the collective runs while the caller goes on. All ranks call it at the same point.

        Raises:
            LanewayError: the one before has not been finished, or the ranks have added different vectors.
        """
        self.seal()
        if self._flying is not None:
            raise LanewayError("statistics: start() came twice without finish()")
        vector, self._filling = self._filling, self._idle.clone()
        work = None
        if self.world_size > 1 and self._length:
            work = dist.all_reduce(vector, group=self.group, async_op=True)
        self._flying = vector, work

    def finish(self) -> None:
        """Wait for the collective; from here on ``get`` returns its values.

        Raises:
            LanewayError: nothing was started.
        """
        if self._flying is None:
            raise LanewayError("statistics: finish() needs a start()")
        (vector, work), self._flying = self._flying, None
        if work is not None:
            work.wait()
        self._latest, self._restored = vector, {}

    def get(self, name: str) -> Tensor | None:
        """The reduced values of the last step that finished, on the device; None before the first.

        Shape [size], of ``gather`` [ranks, size]; the same bits on every rank. A rank that put nothing counts as 0 in a sum
        and not at all in a maximum, and is NaN in a gather.

        Raises:
            InputError: an unknown name.
        """
        entry = self._entries[choice("name", name, self._entries)]
        if self._latest is None:
            return self._restored.get(name)
        found = self._latest[entry.begin : entry.end]
        if entry.op == "sum":
            return found
        by_rank = found.reshape(self.world_size, entry.size)
        return by_rank.amax(0) if entry.op == "max" else by_rank

    def taken(self, name: str) -> Tensor:
        """As ``get``.

        Raises:
            LanewayError: there is nothing yet.
        """
        found = self.get(name)
        if found is None:
            raise LanewayError(f"statistics {name!r}: no step has finished yet")
        return found

    def state_dict(self) -> dict[str, Any]:
        """The reduced values of the last step, for a step that begins after a resume; the same on every rank."""
        found = {name: self.get(name) for name in self._entries}
        return {name: value.cpu() for name, value in found.items() if value is not None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo of ``state_dict``. Values of another shape (another number of ranks) are left out: there are none then."""
        shapes = {
            name: (self.world_size, entry.size) if entry.op == "gather" else (entry.size,)
            for name, entry in self._entries.items()
        }
        self._latest = None
        self._restored = {name: value.to(self.device) for name, value in state.items() if tuple(value.shape) == shapes.get(name)}

    def _own(self, vector: Tensor, entry: _Entry) -> Tensor:
        """This rank's part of a vector."""
        begin = entry.begin + (self.rank * entry.size if entry.places > 1 else 0)
        return vector[begin : begin + entry.size]

    def _agree(self) -> None:
        if self.world_size == 1:
            return
        digest = hashlib.sha256(repr(list(self._entries.items())).encode()).digest()
        number = int.from_bytes(digest[:6], "big")
        found = torch.tensor([number, -number], dtype=torch.int64, device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.group)
        most, least = found.tolist()
        if most != -least:
            mine = ", ".join(f"{name} ({entry.op} of {entry.size})" for name, entry in self._entries.items())
            raise LanewayError(f"the ranks share different statistics; rank {self.rank} has {mine or 'none'}")
