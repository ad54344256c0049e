"""What a micro-batch may change, put back as it was before it: gradients, buffers, generators."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from laneway.core import LanewayError
from laneway.memory.extents import View, plain, version_of
from laneway.memory.retry import RngState
from laneway.memory.tier import Slot, Tier, TierFullError

SMALL = 1 << 20  # bytes of a buffer that is copied before every micro-batch; larger ones only once they were seen to change
PARK_FROM = 64 << 10  # bytes of a gradient that is worth moving


class Buffers:
    """A model's buffers, to be put back.

    Batch normalisation writes its statistics without raising the tensors' version counter, so that buffers of up to ``SMALL``
    bytes are copied every time. Larger ones (tables, mostly) are copied from the second micro-batch on that raises their
    version. State that is no buffer is not put back.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._changing: set[str] = set()
        self._copies: dict[str, Tensor] = {}
        self._seen: dict[str, tuple[Tensor, int | None]] = {}

    def take(self) -> None:
        """Note them all. Allocates the first time; where that fails nothing has happened, and it can be called again."""
        found = dict(self.model.named_buffers())
        for name, buffer in found.items():
            if _size(buffer) > SMALL and name not in self._changing:
                continue
            copy = self._copies.get(name)
            if copy is None or copy.shape != buffer.shape or copy.dtype != buffer.dtype or copy.device != buffer.device:
                self._copies[name] = buffer.detach().clone()
            else:
                copy.copy_(buffer.detach())
        self._seen = {name: (buffer, version_of(buffer)) for name, buffer in found.items()}

    def passed(self) -> None:
        """The micro-batch went through: see which large ones it changed."""
        for name, buffer in self.model.named_buffers():
            if _size(buffer) > SMALL and self._changed(name, buffer):
                self._changing.add(name)

    @torch.no_grad()
    def restore(self) -> None:
        """Put them back, replaced tensors too.

        Raises:
            LanewayError: a large buffer changed for the first time: there is no copy.
        """
        for name, (buffer, _) in self._seen.items():
            module, leaf = self._place(name)
            copied = name in self._copies and (_size(buffer) <= SMALL or name in self._changing)
            now = module._buffers.get(leaf)
            if not copied and (now is not buffer or self._changed(name, buffer)):
                raise LanewayError(
                    f"out of memory, and the micro-batch can't be repeated: it changed the buffer {name!r} "
                    f"of {_size(buffer)} bytes"
                )
            module._buffers[leaf] = buffer
            if copied:
                buffer.copy_(self._copies[name])

    def _changed(self, name: str, buffer: Tensor) -> bool:
        seen = self._seen.get(name)
        return seen is None or seen[0] is not buffer or seen[1] != version_of(buffer)

    def _place(self, name: str) -> tuple[nn.Module, str]:
        parent, _, leaf = name.rpartition(".")
        return self.model.get_submodule(parent), leaf


def leaves(model: nn.Module) -> list[Tensor]:
    """All that a backward pass adds gradients to: parameters, and leaf tensors that modules hold to measure with."""
    own = [value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)]
    return [*model.parameters(), *(value for value in own if value.is_leaf and value.requires_grad)]


class Accumulated:
    """The gradients that earlier micro-batches left, set aside while another one runs.

    The micro-batch finds no gradients and makes its own; afterwards they are added to the ones set aside, in place, which is the
    addition that autograd would have made: the same bits, as long as the micro-batch calls ``backward`` once. Setting aside and
    adding cost nothing that accumulating would not; a copy of the gradients before every micro-batch would move all their bytes
    every time. In exchange the old and the new gradients are there together at the end of the backward pass, when the saved
    tensors are gone: the peak grows only where those are smaller than the gradients.

    After a failure, ``park`` moves what is set aside off the device until it is added, so that the next try has that much more
    room.

    Raises:
        LanewayError: a gradient's bytes are away already (``ParkedGradients``): of the two only one can look after them.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.parameters = list(parameters)
        if any(
            p.grad is not None and plain(p.grad) and p.grad.numel() and not p.grad.untyped_storage().nbytes()
            for p in self.parameters
        ):
            raise LanewayError("gradients are parked in a tier: a micro-batch that may be repeated needs them here; call gather")
        self._held: list[tuple[Tensor, Tensor | _Away]] = [(p, p.grad) for p in self.parameters if p.grad is not None]
        self._added = False
        self.drop_new()

    def drop_new(self) -> None:
        """Discard what the micro-batch has made so far."""
        for parameter in self.parameters:
            parameter.grad = None

    def park(self, tier: Tier | None) -> int:
        """Move what is set aside to ``tier``, else to the host's memory; it stays where that is the device or has no room.

        Returns:
            Bytes that left the device.
        """
        moved = 0
        for at, (parameter, held) in enumerate(self._held):
            if isinstance(held, Tensor) and _size(held) >= PARK_FROM and plain(held) and _whole(held):
                away = _Away.of(held, tier)
                if away is not None:
                    self._held[at] = parameter, away
                    moved += away.nbytes
        return moved

    @torch.no_grad()
    def add_new(self) -> None:
        """Add the micro-batch's gradients to those set aside. Where it raises, what is left can be added by another call."""
        while self._held:
            parameter, held = self._held[-1]
            if isinstance(held, _Away):
                held = held.back()
                self._held[-1] = parameter, held
            new = parameter.grad
            if new is not None:
                held = new + held if held.is_sparse and not new.is_sparse else held.add_(new)
            parameter.grad = held
            self._held.pop()
            self._added = True

    def put_back(self) -> None:
        """As if the micro-batch had not been begun; where it was added in part already, no gradient is left."""
        self.drop_new()
        if not self._added:
            self.add_new()


@dataclass
class _Away:
    """A gradient off the device."""

    view: View
    nbytes: int
    device: torch.device
    tier: Tier | None
    slot: Slot | None
    host: Tensor | None

    @classmethod
    def of(cls, gradient: Tensor, tier: Tier | None) -> _Away | None:
        """Move ``gradient``; None where there is no room for it."""
        view, storage = View.of(gradient), gradient.untyped_storage()
        if tier is not None:
            try:
                slot = tier.allocate(storage.nbytes())
            except TierFullError:
                slot = None
            if slot is not None:
                try:
                    _finish(tier, lambda ended: tier.write(slot, storage, ended).wait())
                except (LanewayError, OSError):
                    tier.release(slot)
                    return None
                return cls(view, storage.nbytes(), gradient.device, tier, slot, None)
        if gradient.device.type == "cpu":
            return None
        return cls(view, storage.nbytes(), gradient.device, None, None, gradient.cpu())

    def back(self) -> Tensor:
        """On the device again. Where the room for it cannot be allocated, it is still away."""
        storage = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device).untyped_storage()
        gradient = self.view.over(storage)
        if self.host is not None:
            gradient.copy_(self.host)
            return gradient
        tier, slot = self.tier, self.slot
        assert tier is not None
        assert slot is not None
        _finish(tier, lambda ended: tier.read(slot, storage, ended, urgent=True).wait())
        tier.release(slot)
        return gradient


def _finish(tier: Tier, start: Callable[[Callable[[BaseException | None], None]], object]) -> None:
    """Run a transfer to its end."""
    errors: list[BaseException | None] = []
    start(errors.append)
    if errors and errors[0] is not None:
        raise LanewayError(f"{tier.name} tier: a gradient could not be moved: {errors[0]}") from errors[0]


class Before:
    """The generators and buffers as a micro-batch finds them."""

    def __init__(self, buffers: Buffers, device: torch.device, generators: Iterable[torch.Generator]) -> None:
        self.buffers, self.device, self.generators = buffers, device, list(generators)
        self._random: RngState | None = None

    def take_or_restore(self) -> None:
        """The first time, note them; afterwards, put them back. May run out of memory the first time only."""
        if self._random is None:
            self.buffers.take()
            self._random = RngState(self.device, self.generators)
            return
        self.restore()

    def restore(self) -> None:
        """Put them back, if they were noted."""
        if self._random is not None:
            self.buffers.restore()
            self._random.restore()


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _whole(tensor: Tensor) -> bool:
    """Whether a tensor is all of its storage, and no part of a bucket."""
    return tensor.untyped_storage().nbytes() == _size(tensor)
