"""Parameters of modules that aren't at work, in a tier.

A module's own parameters come back before its forward and leave after it; in the backward pass each comes back when autograd
unpacks it and leaves when autograd has let go of it. They keep their identity: the optimizer's references, tied uses and the
views that autograd saved see the bytes when they are back, for the storage stays the same one and only its size goes to zero
meanwhile. Any other use of a parameter that is away raises.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from laneway.core import InputError, positive_int
from laneway.memory.extents import key_of
from laneway.memory.parcel import Books, Parcel, Where
from laneway.memory.saved_parameters import SavedParameters
from laneway.memory.tier import Tier


class StreamedParameters:
    """Keeps the parameters of ``model`` in ``tier`` except those at work and what comes next.

    A training step is forward and backward as ever, then ``with streamed.all_here(): optimizer.step()``; clipping reads
    gradients only and needs nothing. ``state_dict`` and ``load_state_dict`` (without ``assign``) bring everything back first.
    The modules that matter are those that own parameters: one that uses another's (tied weights) must hold them as its own too,
    else the use raises. A parameter that a module returns, or a view of it, stays here, and so does one that a backward pass with
    ``create_graph`` used. A module must not put a view of its parameter where others find it other than by returning it.

    Args:
        model: on its device already; in a tier from now on.
        tier: where the parameters live.
        window_bytes: most bytes that are brought ahead of their turn, and most that are leaving at a time.
        smallest: parameters of fewer bytes stay here.
        stay_without_grad: what a forward pass without gradients brought stays until the next one with gradients.

    Raises:
        InputError: a parameter whose storage can't give its memory up: it is shared with numpy, a file or other processes.
    """

    def __init__(
        self,
        model: nn.Module,
        tier: Tier,
        *,
        window_bytes: int = 64 << 20,
        smallest: int = 4096,
        stay_without_grad: bool = False,
    ) -> None:
        self.model, self.tier, self.stay_without_grad = model, tier, stay_without_grad
        self.window_bytes = positive_int("window_bytes", window_bytes)
        self._books = Books()
        self._parcels = _parcels_of(model, tier, self._books, positive_int("smallest", smallest, 0))
        self._own = {
            module: list(
                dict.fromkeys(self._parcels[c] for p in module.parameters(recurse=False) if (c := key_of(p)) in self._parcels)
            )
            for module in model.modules()
        }
        self._users = dict.fromkeys(self._parcels.values(), 0)
        self._kept: set[Parcel] = set()
        self._leaving: deque[Parcel] = deque()
        self._idle: deque[Parcel] = deque()  # let go of by autograd, noticed where it is safe to act on it
        self._route = _Route(4 * len(self._users) + 4)
        self._task = -1  # autograd's number of the backward pass
        self._saved = SavedParameters(self._parcels, self._unpacked, self._idle.append)
        self._pushed: list[saved_tensors_hooks | None] = []
        self._hooks: list[Any] = []
        for module, parcels in self._own.items():
            if parcels:
                self._hooks.append(module.register_forward_pre_hook(self._before_forward, prepend=True))
                self._hooks.append(module.register_forward_hook(self._after_forward, always_call=True))
            self._hooks.append(module.register_state_dict_pre_hook(lambda *_: self.bring_all()))
            self._hooks.append(module.register_load_state_dict_pre_hook(lambda *_: self.bring_all()))
        self.send_all()
        self._books.peak = self._books.resident

    @property
    def resident(self) -> int:
        """Bytes on the device now of the parameters that may leave it."""
        return self._books.resident

    @property
    def peak(self) -> int:
        """The most there were since they first left."""
        return self._books.peak

    def bring_all(self) -> None:
        """Bring every parameter back; each stays until its module has worked, a backward pass ends, or ``send_all``."""
        for parcel in self._users:
            if parcel.where is not Where.HERE:
                parcel.fetch()
        for parcel in self._users:
            parcel.arrive()
        self._leaving.clear()

    def send_all(self) -> None:
        """Send every parameter away that no module is at work with."""
        self._send(list(self._users))
        while self._leaving:
            self._leaving.popleft().settle()

    @contextmanager
    def all_here(self) -> Generator[None]:
        """Every parameter is here inside: for the optimizer, initialization or averaging."""
        self.bring_all()
        try:
            yield
        finally:
            self.send_all()

    def close(self) -> None:
        """Bring everything back and stop. Safe to call twice."""
        self.bring_all()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for parcel in self._users:
            parcel.drop()
        self._users.clear()

    # -- forward

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        self._pushed.append(self._saved.push())
        for parcel in self._own[module]:
            self._users[parcel] += 1
        for parcel in self._own[module]:
            self._demand(parcel)

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        pushed = self._pushed.pop()
        if pushed is not None:
            pushed.__exit__(None, None, None)
        for parcel in self._own[module]:
            self._users[parcel] -= 1
        for leaf in tree_leaves(output):
            if (
                isinstance(leaf, Tensor)
                and leaf.layout is torch.strided
                and (parcel := self._parcels.get(key_of(leaf))) is not None
            ):
                self._kept.add(parcel)
        if torch.is_grad_enabled() or not self.stay_without_grad:
            self._send(self._own[module])

    # -- backward

    def _unpacked(self, parcel: Parcel) -> None:
        """Autograd is about to use it."""
        task = torch._C._current_graph_task_id()
        if task != self._task:  # one that failed never came to its end
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)
        self._send_idle()
        self._demand(parcel)
        if torch.is_grad_enabled():  # the backward pass is recorded in its turn, and saves the parameter where no hook sees it
            self._kept.add(parcel)

    def _end_of_backward(self) -> None:
        self._idle.clear()
        self._route.end()
        self.send_all()

    def _send_idle(self) -> None:
        while self._idle:
            parcel = self._idle.popleft()
            if not self._saved.uses[parcel]:
                self._send([parcel])

    # -- moving

    def _demand(self, parcel: Parcel) -> None:
        """Bring it now, and what was asked for after it in the step before ahead of its turn."""
        if parcel not in self._users:  # closed in the meantime: all is here
            return
        parcel.arrive()
        ahead = 0
        for following in self._route.next_after(parcel):
            ahead += following.nbytes
            if ahead > self.window_bytes:
                return
            if following.where is Where.AWAY:
                following.fetch()

    def _send(self, parcels: list[Parcel]) -> None:
        for parcel in parcels:
            if self._users.get(parcel) != 0 or parcel in self._kept or parcel.where not in (Where.HERE, Where.COMING):
                continue
            parcel.arrive()
            while self._leaving and sum(p.nbytes for p in self._leaving) + parcel.nbytes > self.window_bytes:
                self._leaving.popleft().settle()
            if parcel.send():
                self._leaving.append(parcel)


class _Route:
    """In which order parcels were asked for in the step before, and where in it this step is."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self._before: list[Parcel] = []
        self._now: list[Parcel] = []
        self._place = 0

    def next_after(self, parcel: Parcel) -> list[Parcel]:
        """What followed ``parcel`` in the step before; nothing where this step goes another way."""
        if len(self._now) < self.longest:
            self._now.append(parcel)
        try:
            self._place = self._before.index(parcel, self._place) + 1
        except ValueError:
            return []
        return self._before[self._place :]

    def end(self) -> None:
        """The step is over."""
        self._before, self._now, self._place = self._now, [], 0


def _parcels_of(model: nn.Module, tier: Tier, books: Books, smallest: int) -> dict[int, Parcel]:
    """A parcel for each storage of parameters, by the storage's address, which is its own as long as the parcel holds it."""
    found: dict[int, dict[str, Tensor]] = {}
    for name, parameter in model.named_parameters():
        if parameter.layout is torch.strided and parameter.untyped_storage().nbytes() >= max(1, smallest):
            found.setdefault(key_of(parameter), {})[name] = parameter
    for tensors in found.values():
        name, parameter = next(iter(tensors.items()))
        if not parameter.untyped_storage().resizable():
            raise InputError(
                name, "a storage of fixed size", "a parameter whose memory isn't shared with numpy, a file or processes"
            )
    return {key: Parcel(tier, list(tensors.values()), books) for key, tensors in found.items()}
