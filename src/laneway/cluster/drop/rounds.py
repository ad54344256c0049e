"""One all-reduce of a dropper: thin, send to owners, sum, thin again, send to all; only then are residuals replaced."""

from __future__ import annotations

import torch
from torch import Tensor

from laneway.cluster.drop.exchange import Members
from laneway.cluster.drop.message import decode, encode, poison, poisoned
from laneway.cluster.drop.residuals import Slot
from laneway.cluster.drop.sizes import Format, message_format, parts
from laneway.cluster.drop.units import norms
from laneway.cluster.drop.values import MOST

__all__ = ["Round"]


class Round:
    """Working state of one call; see ``GradientDropper.all_reduce``.

    Args:
        shard: fp32 [n]; becomes the result.
        slot: residuals and pattern.
        members: of the group.
        drop, wire, unit: see sizes.py.
        rooms: memory that calls of one thread share, by purpose.
    """

    def __init__(
        self, shard: Tensor, slot: Slot, members: Members, drop: float, wire: str, unit: str, rooms: dict[str, Tensor]
    ) -> None:
        self.shard, self.slot, self.members, self._rooms = shard, slot, members, rooms
        self.bounds = parts(shard.numel(), len(members))
        self.forms = [message_format(stop - start, drop, wire, unit) for start, stop in self.bounds]
        self.acc = self._room("sums", shard.numel(), torch.float32 if slot.residual is None else slot.residual.dtype)
        self.values: Tensor | None = self.acc
        if self.acc.dtype != torch.float32:
            by_blocks = all(self._by_blocks(q) for q, form in enumerate(self.forms) if form.entries)
            self.values = None if by_blocks else self._room("values", shard.numel(), torch.float32)
        self._sizes: list[Tensor | None] = [None] * len(self.forms)

    def run(self) -> int:
        """Returns the bytes sent; nothing but the shard has changed where it fails."""
        here = self.members.place
        sound = self._gather_gradient()
        if all(sound):
            self.slot.pattern.observe(self.acc if self.values is None else self.values)
        outgoing = self._messages("out", self.forms)
        for q, message in enumerate(outgoing):
            if q != here:
                self._write(q, message, sound[q])
        incoming = self._messages("in", [self.forms[here]] * len(self.members))
        sent = self.members.exchange(outgoing, incoming)
        self._sum(outgoing[here], incoming, sound[here])
        results = self._messages("results", self.forms)
        results[here] = outgoing[here]
        sent += self.members.exchange([outgoing[here]] * len(self.members), results)
        self._finish(results)
        return sent

    def _gather_gradient(self) -> list[bool]:
        """Gradient + residual; returns whether all of each part is finite."""
        self.acc.copy_(self.shard)  # an addition of two types at once would take several times as long
        if self.slot.residual is not None:
            self.acc.add_(self.slot.residual)
        if self.values is not None and self.values is not self.acc:
            self.values.copy_(self.acc)
        for q, (low, high) in enumerate(self.bounds):
            if q != self.members.place and self._by_blocks(q):
                self._sizes[q] = norms(self.acc[low:high])
        return [self._sound(q) for q in range(len(self.bounds))]

    def _by_blocks(self, q: int) -> bool:
        """Whether blocks of part q are kept or dropped."""
        return self.forms[q].unit > 1 and self.forms[q].coding != "dense"

    def _sound(self, q: int) -> bool:
        """Whether all of part q is finite. Of a part that goes to another the sizes of its blocks tell, which are needed too."""
        low, high = self.bounds[q]
        if low == high or self._measured(q):
            return True
        if self.values is None:  # sums of fp32 numbers don't exceed fp64
            return _finite(self.shard[low:high])
        return self._bounded(low, high, self.shard[low:high])

    def _measured(self, q: int) -> bool:
        """Whether sizes of part q's blocks are there and all finite; others are of no use."""
        sizes = self._sizes[q]
        if sizes is None or sizes.sum().isfinite():
            return sizes is not None
        self._sizes[q] = None
        return False

    def _bounded(self, low: int, high: int, source: Tensor | None) -> bool:
        """Whether values are finite; those that only grew too large for fp32 are made the largest."""
        if self.values is None or low == high or _finite(self.values[low:high]):
            return True
        if source is not None and not _finite(source):
            return False
        self.values[low:high].clamp_(-MOST, MOST)
        return True

    def _write(self, q: int, message: Tensor, sound: bool) -> None:
        """Part q's large entries into the message, and out of the accumulated gradient."""
        (low, high), form = self.bounds[q], self.forms[q]
        if low == high:
            return
        if not sound:
            poison(message)
            return
        vector = (self.acc if self.values is None else self.values)[low:high]
        units = self.slot.pattern.choose(vector, low, high, form, self._sizes[q])
        encode(vector, units, form, message).add_to(self.acc[low:high], -1)

    def _sum(self, message: Tensor, incoming: list[Tensor], sound: bool) -> None:
        """The sum of this member's part, in the order of the members, thinned into ``message``."""
        here = self.members.place
        low, high = self.bounds[here]
        if low == high:
            return
        form, total = self.forms[here], self.acc[low:high]
        others = [each for q, each in enumerate(incoming) if q != here]
        sound = sound and not any(poisoned(each, form) for each in others)
        if sound:
            for each in others:
                decode(each, form).add_to(total)
            if self.values is not None and self.values is not self.acc:
                self.values[low:high].copy_(total)
            self._sizes[here] = norms(total) if self._by_blocks(here) else None
            if not self._measured(here):
                self._bounded(low, high, None)
        self._write(here, message, sound)

    def _finish(self, results: list[Tensor]) -> None:
        """Results into the shard; residuals of parts that came through are replaced."""
        residual, spoiled = self.slot.residual, []
        for (low, high), form, message in zip(self.bounds, self.forms, results, strict=True):
            if low == high:
                continue
            if poisoned(message, form):
                self.shard[low:high].fill_(torch.nan)
                spoiled.append((low, high))
            else:
                decode(message, form).write_to(self.shard[low:high])
        if residual is not None:
            for low, high in spoiled:
                self.acc[low:high].copy_(residual[low:high])
            self.slot.residual = self._exchanged("sums", residual)

    def _exchanged(self, purpose: str, old: Tensor) -> Tensor:
        """What the room holds, as a tensor of its own: the room itself where it is no larger, and ``old`` becomes the room."""
        name = self._name(purpose, old.dtype)
        room = self._rooms[name]
        if room.numel() != old.numel():
            return old.copy_(room[: old.numel()])
        self._rooms[name] = old
        return room

    def _messages(self, purpose: str, forms: list[Format]) -> list[Tensor]:
        """Room for a message of each form, each beginning at a multiple of 8 bytes."""
        sizes = [-(-form.nbytes // 8) * 8 for form in forms]
        room = self._room(purpose, sum(sizes), torch.uint8)
        return [each[: form.nbytes] for each, form in zip(room.split(sizes), forms, strict=True)]

    def _room(self, purpose: str, size: int, dtype: torch.dtype) -> Tensor:
        """[size], not initialised, the same memory in every call that is no larger than those before."""
        name = self._name(purpose, dtype)
        if name not in self._rooms or self._rooms[name].numel() < size:
            self._rooms[name] = torch.empty(size, dtype=dtype, device=self.shard.device)
        return self._rooms[name][:size]

    def _name(self, purpose: str, dtype: torch.dtype) -> str:
        return f"{purpose} {dtype} {self.shard.device}"


def _finite(values: Tensor) -> bool:
    low, high = torch.aminmax(values)
    return bool(low.isfinite() and high.isfinite())
