"""Parameters of modules that aren't at work, in a tier.

A module's own parameters come back before its forward and before its backward, and leave after either. They keep their identity: the
optimizer's references, tied uses and the views that autograd saved all see the bytes when they are back, for the storage stays the
same one and only its size goes to zero meanwhile. Any other use of a parameter that is away raises.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from laneway.core import InputError, positive_int
from laneway.memory.parcel import Books, Parcel, Where
from laneway.memory.tier import Tier


class StreamedParameters:
    """Keeps the parameters of ``model`` in ``tier`` except those of the modules at work and what comes next.

    A training step: forward and backward as ever, then ``with streamed.all_here(): optimizer.step()`` (clipping reads gradients
    only and needs nothing). ``state_dict``, ``load_state_dict`` and the model's ``named_parameters`` work as ever; reading a state
    dict brings everything back until the next forward.

    Modules are those that own parameters themselves. A module that reads another's parameters without calling it (as tied weights
    through ``F.linear(x, self.table.weight)``) must hold them too: ``self.weight = self.table.weight``.

    Args:
        model: on its device already.
        tier: where the parameters live.
        window_bytes: most bytes that are brought ahead of their turn, and most that are leaving.
        smallest: bytes below which a parameter stays here.

    Raises:
        InputError: a parameter's storage that can't give its memory up (it is shared with numpy, a file or other processes).
    """

    def __init__(self, model: nn.Module, tier: Tier, *, window_bytes: int = 64 << 20, smallest: int = 4096) -> None:
        self.model, self.tier = model, tier
        self.window_bytes = positive_int("window_bytes", window_bytes)
        self._books = Books()
        self._parcels: dict[nn.Module, list[Parcel]] = {}
        self._users: dict[Parcel, int] = {}
        self._leaving: deque[Parcel] = deque()
        self._order: list[nn.Module] = []  # in which modules began to work in the step before
        self._now: list[nn.Module] = []
        self._place = -1
        self._closed = False
        self._make_parcels(positive_int("smallest", smallest, 0))
        self._hooks: list[Any] = []
        for module in self._parcels:
            self._hooks += [
                module.register_forward_pre_hook(self._before_forward, prepend=True),
                module.register_forward_hook(self._after_forward, always_call=True),
                module.register_full_backward_pre_hook(self._before_backward),
                module.register_full_backward_hook(self._after_backward),
            ]
        for module in model.modules():
            self._hooks.append(module.register_state_dict_pre_hook(lambda module, prefix, keep_vars: self.bring_all()))
            self._hooks.append(module.register_load_state_dict_pre_hook(lambda *_: self.bring_all()))
        self._send(list(self._users))
        self._settle()
        self._books.peak = self._books.resident

    @property
    def resident(self) -> int:
        """Bytes on the device now of the parameters that are looked after."""
        return self._books.resident

    @property
    def peak(self) -> int:
        """The most there ever were since the start."""
        return self._books.peak

    def bring_all(self) -> None:
        """Bring every parameter back until the next forward."""
        for parcel in self._users:
            if parcel.where is not Where.HERE:
                parcel.fetch()
        for parcel in self._users:
            parcel.arrive()
        self._leaving.clear()

    def send_all(self) -> None:
        """Send away every parameter that no module works with."""
        self._send([parcel for parcel, users in self._users.items() if users == 0])
        self._settle()

    @contextmanager
    def all_here(self) -> Iterator[None]:
        """Every parameter is here inside, for the optimizer, initialization or averaging."""
        self.bring_all()
        try:
            yield
        finally:
            self._working_again()
            self.send_all()

    def close(self) -> None:
        """Bring everything back and stop. Safe to call twice."""
        if self._closed:
            return
        self.bring_all()
        self._closed = True
        for hook in self._hooks:
            hook.remove()
        for parcel in self._users:
            parcel.drop()
        self._users.clear()
        self._parcels.clear()

    def _make_parcels(self, smallest: int) -> None:
        by_storage: dict[int, dict[int, Tensor]] = {}
        for parameter in self.model.parameters():
            storage = parameter.untyped_storage()
            if parameter.layout is torch.strided and storage.nbytes() >= max(1, smallest):
                by_storage.setdefault(storage._cdata, {})[id(parameter)] = parameter
        parcels: dict[int, Parcel] = {}
        for tensors in by_storage.values():
            first = next(iter(tensors.values()))
            if not first.untyped_storage().resizable():
                name = next(name for name, p in self.model.named_parameters() if p is first)
                raise InputError(name, "a storage of a fixed size", "a parameter whose memory isn't shared with numpy or a file")
            parcel = Parcel(self.tier, list(tensors.values()), self._books)
            self._users[parcel] = 0
            parcels.update(dict.fromkeys(tensors, parcel))
        for module in self.model.modules():
            own = [parcels[id(p)] for p in module.parameters(recurse=False) if id(p) in parcels]
            if own:
                self._parcels[module] = list(dict.fromkeys(own))

    # -- hooks

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        self._begin(module)

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        self._end(module)

    def _before_backward(self, module: nn.Module, grad_output: Any) -> None:
        self._begin(module)

    def _after_backward(self, module: nn.Module, grad_input: Any, grad_output: Any) -> None:
        self._end(module)

    def _begin(self, module: nn.Module) -> None:
        for parcel in self._parcels[module]:
            self._users[parcel] += 1
            parcel.arrive()

    def _end(self, module: nn.Module) -> None:
        for parcel in self._parcels[module]:
            self._users[parcel] -= 1
        self._send([parcel for parcel in self._parcels[module] if self._users[parcel] == 0])

    def _working_again(self) -> None:
        """After a step, or an error in one, no module is at work."""
        self._users = dict.fromkeys(self._users, 0)

    # -- moving

    def _send(self, parcels: list[Parcel]) -> None:
        for parcel in parcels:
            while self._leaving and sum(p.nbytes for p in self._leaving) + parcel.nbytes > self.window_bytes:
                self._leaving.popleft().settle()
            if parcel.where is Where.HERE and parcel.send():
                self._leaving.append(parcel)

    def _settle(self) -> None:
        while self._leaving:
            self._leaving.popleft().settle()
