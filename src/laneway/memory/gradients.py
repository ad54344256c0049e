"""Gradients in a tier between the micro-batches of a step.

Before autograd adds to a gradient that is away it is brought back, and afterwards it leaves again: the sum is the one that
autograd itself makes, bit for bit. ``p.grad`` stays the same tensor throughout; while it is away any use of it raises, so
clipping or an optimizer's step without ``gather`` before it is an error and not a silent omission.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from laneway.core import LanewayError, positive_int
from laneway.memory.parcel import Books, Parcel, Where
from laneway.memory.tier import Tier


class ParkedGradients:
    """Moves the gradients of ``parameters`` to ``tier`` as the backward pass makes them, until ``gather``.

    Order of calls in a step: the micro-batches' backward passes, ``gather``, then clipping and ``optimizer.step`` as ever.
    Gradients that are sparse, that something else refers to, or that don't fit into the tier stay where they are.

    Args:
        parameters: leaves of the graph; those that need no gradient are left out.
        tier: where the gradients wait.
        window_bytes: most bytes of gradients that are leaving or coming back ahead of their turn.
    """

    def __init__(self, parameters: Iterable[Tensor], tier: Tier, *, window_bytes: int = 64 << 20) -> None:
        self.parameters = [p for p in dict.fromkeys(parameters) if p.requires_grad]
        self.tier, self.window_bytes = tier, positive_int("window_bytes", window_bytes)
        self._books = Books()
        self._parcels: dict[Tensor, Parcel] = {}
        self._leaving: deque[Parcel] = deque()
        self._made: list[Parcel] = []
        self._order: list[Tensor] = []  # in which the backward pass before made them
        self._places: dict[Tensor, int] = {}  # and this one, so far
        self._handles = []
        for parameter in self.parameters:
            self._handles.append(parameter.register_hook(_bound(self._before, parameter)))
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._after))

    @property
    def resident(self) -> int:
        """Bytes on the device now of the gradients that are looked after."""
        return self._books.resident

    @property
    def peak(self) -> int:
        """The most there ever were."""
        return self._books.peak

    def gather(self) -> None:
        """Bring every gradient back, complete; to be called before anything reads them."""
        for parcel in list(self._parcels.values()):
            self._arrive(parcel)
        self._forget_all()
        self._made, self._order, self._places = [], [], {}

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of all gradients together, as ``torch.nn.utils.get_total_norm`` computes it; brings them back."""
        self.gather()
        return torch.nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None], norm_type)

    def close(self) -> None:
        """Bring the gradients back and stop. Safe to call twice."""
        self.gather()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # -- hooks

    def _before(self, parameter: Tensor) -> None:
        """Autograd is about to add to the gradient."""
        self._send_made()
        self._note(parameter)
        parcel = self._parcels.get(parameter)
        if parcel is None:
            return
        if parameter.grad is not parcel.tensors[0]:  # it was set to None, or replaced
            self._forget(parameter)
            return
        self._arrive(parcel)
        self._look_ahead(parameter)

    def _after(self, parameter: Tensor) -> None:
        """Autograd has added to the gradient, and still holds it: it leaves when the next one is made, or at the end."""
        gradient = parameter.grad
        if gradient is None:
            return
        parcel = self._parcels.get(parameter)
        if parcel is None:
            if not _moves(gradient):
                return
            parcel = self._parcels[parameter] = Parcel(self.tier, [gradient], self._books)
        if not self._made:
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
        self._made.append(parcel)

    def _end(self) -> None:
        """The backward pass is over."""
        ahead = [p for p in self._parcels.values() if p.where in (Where.COMING, Where.HERE) and p not in self._made]
        for parcel in ahead:  # brought back for nothing: this pass did not add to them
            parcel.arrive()
        self._made += ahead
        self._send_made()
        while self._leaving:
            self._settle_oldest()

    def _send_made(self) -> None:
        self.tier.poll()
        made, self._made = self._made, []
        for parcel in made:
            while self._leaving and sum(p.nbytes for p in self._leaving) + parcel.nbytes > self.window_bytes:
                self._settle_oldest()
            if parcel.where is Where.HERE and not parcel.shared and parcel.send():
                self._leaving.append(parcel)

    # -- order

    def _note(self, parameter: Tensor) -> None:
        if parameter in self._places:  # a second time: a new pass has begun
            self._order, self._places = list(self._places), {}
        self._places[parameter] = len(self._places)

    def _look_ahead(self, parameter: Tensor) -> None:
        """Bring back what the pass before added to next, as far as the window goes."""
        place, ahead = self._places[parameter], 0
        if place >= len(self._order) or self._order[place] is not parameter:
            return
        for following in self._order[place + 1 :]:
            parcel = self._parcels.get(following)
            if parcel is None:
                continue
            ahead += parcel.nbytes
            if ahead > self.window_bytes:
                return
            if parcel.where is Where.AWAY and following.grad is parcel.tensors[0]:
                parcel.fetch()

    # -- books

    def _arrive(self, parcel: Parcel) -> None:
        if parcel in self._leaving:
            self._leaving.remove(parcel)
        try:
            parcel.arrive()
        except Exception as error:
            raise LanewayError(f"a gradient of {parcel.nbytes} bytes could not be read back: {error}") from error

    def _settle_oldest(self) -> None:
        self._leaving.popleft().settle()

    def _forget(self, parameter: Tensor) -> None:
        parcel = self._parcels.pop(parameter)
        if parcel in self._leaving:
            self._leaving.remove(parcel)
        parcel.drop()

    def _forget_all(self) -> None:
        for parameter in list(self._parcels):
            self._forget(parameter)


def _bound(hook: Callable[[Tensor], None], parameter: Tensor) -> Callable[[Tensor], None]:
    return lambda gradient: hook(parameter)


def _moves(gradient: Tensor) -> bool:
    """Whether it is dense, has a storage of its own, and is not part of a graph."""
    return (
        gradient.layout is torch.strided
        and gradient.numel() > 0
        and not gradient.requires_grad
        and not hasattr(type(gradient), "__tensor_flatten__")
        and gradient.untyped_storage().nbytes() == gradient.numel() * gradient.element_size()
        and gradient.untyped_storage().resizable()
    )
