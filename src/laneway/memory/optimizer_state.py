"""The state of an optimizer in a tier between its steps: within a step it comes, is updated and leaves chunk by chunk.

The optimizer stays the user's own object: its groups, defaults, hooks, schedulers and scaler work on it as before. Its ``step``
is called once per chunk with the groups narrowed to the chunk's parameters, which changes nothing for optimizers that treat every
parameter by itself: the results are the same bit for bit.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from laneway.core import InputError, LanewayError, positive_int
from laneway.memory.extents import key_of
from laneway.memory.lowbit_moments import is_encoded
from laneway.memory.optimizer_chunks import Options, step_of
from laneway.memory.parcel import Books, Parcel, Where
from laneway.memory.state_loading import StateLoading
from laneway.memory.tier import Tier

if TYPE_CHECKING:
    from laneway.memory.optimizer_lowbit import Moments

PREDICTED_RATIO = 3.0  # bytes of state per byte of parameter until some was seen: AdamW with amsgrad


class StreamedOptimizerState:
    """Keeps what an optimizer remembers of its parameters in ``tier``.

    At most two chunks of state are on the device at a time, in the first step too; a parameter whose state is larger than that
    comes alone. Scalars (the ``step`` of Adam) never move. ``state_dict`` returns complete tensors, copies in host memory;
    ``load_state_dict`` writes to the tier parameter by parameter. State that doesn't fit into the tier stays on the device.

    Args:
        optimizer: one of torch's own that updates every parameter by itself, or one whose class says so by an attribute
            ``updates_each_parameter_alone = True``.
        tier: where the state lives; None: it stays on the device.
        chunk_bytes: bytes of state that are updated at a time.
        moments: what makes moments of few bits whole for an update; see ``LowBitOptimizerState``.

    Raises:
        InputError: an optimizer that looks at all parameters at once, or one whose ``step`` was replaced.
    """

    def __init__(
        self, optimizer: Optimizer, tier: Tier | None, *, chunk_bytes: int = 64 << 20, moments: Moments | None = None
    ) -> None:
        self.optimizer, self.tier, self._moments = optimizer, tier, moments
        self.chunk_bytes = positive_int("chunk_bytes", chunk_bytes)
        self._books = Books()
        self._raw_step = step_of(optimizer)
        self._ratio: float | None = None
        self._parcels: dict[Tensor, list[Parcel]] = {}
        self._leaving: deque[Parcel] = deque()
        self._reserved = 0
        self._closed = False
        self._replaced: Any = optimizer.__dict__.get("step")
        self._step = _replacement(self, self._raw_step)
        optimizer.step = types.MethodType(self._step, optimizer)  # type: ignore[method-assign]
        loading = StateLoading(self._forget, self._load, self._check)
        self._hooks = [
            optimizer.register_state_dict_post_hook(self._complete),
            optimizer.register_load_state_dict_pre_hook(loading.before),
            optimizer.register_load_state_dict_post_hook(loading.after),
        ]
        known = [p for p in optimizer.state if isinstance(p, Tensor)]
        if moments is not None:
            for parameter in known:
                moments.encode(parameter, {})
        self._adopt(known)
        self._send(known)
        self._settle()
        self._books.peak = self._books.resident

    @property
    def resident(self) -> int:
        """Bytes of state on the device now; scalars don't count."""
        return self._books.resident

    @property
    def peak(self) -> int:
        """The most there ever were."""
        return self._books.peak

    def close(self) -> None:
        """Bring all state back and leave the optimizer as it was. Safe to call twice."""
        if self._closed:
            return
        for parcels in self._parcels.values():
            for parcel in parcels:
                parcel.arrive()
                parcel.drop()
        self._parcels.clear()
        self._closed = True
        if self._moments is not None:
            for parameter in [p for p in self.optimizer.state if isinstance(p, Tensor)]:
                self._moments.decode(parameter)
        for hook in self._hooks:
            hook.remove()
        current = self.optimizer.__dict__.get("step")
        if getattr(current, "__func__", None) is self._step:  # else a scheduler has wrapped it: then it passes everything through
            del self.optimizer.__dict__["step"]
            if self._replaced is not None:
                self.optimizer.__dict__["step"] = self._replaced

    # -- a step

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """What the optimizer's ``step`` does meanwhile."""
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # what schedulers look for
        if self._closed:
            return self._raw_step(self.optimizer, *args, **kwargs)
        if (args and args[0] is not None) or kwargs.get("closure") is not None:
            raise InputError("closure", "a function", "None: a step that evaluates the model again can't be done in chunks")
        groups = self.optimizer.param_groups
        pieces = self._pieces(groups)
        merged = Options(groups)
        try:
            if pieces:
                self._admit(pieces[0], must=True)
            for index, piece in enumerate(pieces):
                self._bring(piece)
                ahead = index + 1 < len(pieces) and self._admit(pieces[index + 1], must=False)
                self.optimizer.param_groups = merged.narrowed(piece)
                with self._whole(piece):
                    self._raw_step(self.optimizer, *args, **kwargs)
                merged.take(self.optimizer.param_groups)
                self.optimizer.param_groups = groups
                self._reserved -= self._unborn(piece)
                self._adopt(piece)
                self._send(piece)
                if index + 1 < len(pieces) and not ahead:
                    self._admit(pieces[index + 1], must=True)
        finally:
            self.optimizer.param_groups = groups
            self._reserved = 0
            self._settle()
        merged.apply()
        return None

    def _pieces(self, groups: Sequence[dict[str, Any]]) -> list[list[Tensor]]:
        """Parameters with a gradient, in order. Three pieces (coming, here, leaving) are two chunks."""
        pieces: list[list[Tensor]] = []
        most, size = self.chunk_bytes * 2 // 3, 0
        for group in groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                nbytes = self._expected(parameter)
                if self._moments is not None:
                    nbytes += self._moments.decoded_bytes(parameter)
                if not pieces or size + nbytes > most:
                    pieces.append([])
                    size = 0
                pieces[-1].append(parameter)
                size += nbytes
        return pieces

    def _whole(self, piece: list[Tensor]) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if self._moments is None else self._moments.decoded(piece)

    def _expected(self, parameter: Tensor) -> int:
        parcels = self._parcels.get(parameter)
        if parcels is not None:
            return sum(parcel.nbytes for parcel in parcels)
        ratio = PREDICTED_RATIO if self._ratio is None else self._ratio
        return int(parameter.numel() * parameter.element_size() * ratio)

    def _unborn(self, piece: list[Tensor]) -> int:
        return sum(self._expected(p) for p in piece if p not in self._parcels)

    def _admit(self, piece: list[Tensor], must: bool) -> bool:
        """Begin to bring a piece, once two chunks hold it beside what is here; False where they don't and it need not be now."""
        away = [parcel for p in piece for parcel in self._parcels.get(p, ()) if parcel.where is Where.AWAY]
        unborn = self._unborn(piece)
        need = sum(parcel.nbytes for parcel in away) + unborn
        while self.resident + self._reserved + need > 2 * self.chunk_bytes and self._leaving:
            self._settle_oldest()
        if not must and self.resident + self._reserved + need > 2 * self.chunk_bytes:
            return False
        self._reserved += unborn
        for parcel in away:
            parcel.fetch()
        return True

    def _bring(self, piece: list[Tensor]) -> None:
        for parameter in piece:
            for parcel in self._parcels.get(parameter, ()):
                parcel.arrive()

    def _adopt(self, parameters: Sequence[Tensor]) -> None:
        """Make parcels of state that is new, and forget those of state that the optimizer has replaced."""
        if self.tier is None:
            return
        for parameter in parameters:
            found: dict[int, list[Tensor]] = {}
            for value in self.optimizer.state.get(parameter, {}).values():
                if _moves(value):
                    found.setdefault(key_of(value), []).append(value)
            kept = []
            for parcel in self._parcels.get(parameter, ()):
                if [id(t) for t in found.get(parcel.storage._cdata, ())] == [id(t) for t in parcel.tensors]:
                    kept.append(parcel)
                    del found[parcel.storage._cdata]
                else:
                    parcel.drop()
            for tensors in found.values():
                kept.append(Parcel(self.tier, tensors, self._books))
            self._parcels[parameter] = kept
            if kept:
                state = sum(parcel.nbytes for parcel in kept)
                self._ratio = max(self._ratio or 0.0, state / max(1, parameter.numel() * parameter.element_size()))

    def _send(self, parameters: Sequence[Tensor]) -> None:
        for parameter in parameters:
            for parcel in self._parcels.get(parameter, ()):
                if not parcel.shared and parcel.send():
                    self._leaving.append(parcel)

    def _settle_oldest(self) -> None:
        self._leaving.popleft().settle()

    def _settle(self) -> None:
        while self._leaving:
            self._settle_oldest()
        for parcels in self._parcels.values():  # after an error, which is raised already, some may still be coming
            for parcel in parcels:
                if parcel.where is Where.COMING:
                    with contextlib.suppress(Exception):
                        parcel.arrive()

    # -- saving and loading

    def _complete(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The state dict with copies in place of what is away."""
        copies: dict[int, Tensor] = {}
        for parcels in self._parcels.values():
            for parcel in parcels:
                if parcel.where is Where.HERE:
                    continue
                storage = parcel.copy()
                for t in parcel.tensors:
                    copies[id(t)] = torch.empty(0, dtype=t.dtype).set_(storage, t.storage_offset(), t.size(), t.stride())
        state = {
            key: {name: copies.get(id(value), value) for name, value in entry.items()} if isinstance(entry, dict) else entry
            for key, entry in state_dict["state"].items()
        }
        return state_dict | {"state": state}

    def _forget(self) -> None:
        for parcels in self._parcels.values():
            for parcel in parcels:
                parcel.drop()
        self._parcels.clear()

    def _check(self, state_dict: dict[str, Any]) -> None:
        if self._moments is not None:
            self._moments.check(state_dict)
        elif any(is_encoded(name) for entry in state_dict["state"].values() if isinstance(entry, dict) for name in entry):
            raise LanewayError("the state dict's moments are of few bits: load it into an optimizer with LowBitOptimizerState")

    def _load(self, parameter: Tensor, values: dict[str, Tensor]) -> None:
        """Take the loaded ``values`` of one parameter: to the tier, or where that is full to the device."""
        if not values:
            return
        if self._moments is not None:
            values = self._moments.loaded(parameter, values)
        kept, state = [], self.optimizer.state[parameter]
        for name, value in values.items():
            if self.tier is None:
                state[name] = value.clone()
                continue
            own = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)
            source = value.untyped_storage()
            if source.nbytes() != own.untyped_storage().nbytes() or value.storage_offset():
                source = own.copy_(value).clone().untyped_storage()
            parcel = Parcel(self.tier, [own], self._books)
            if parcel.send_from(source):
                parcel.settle()
                if parcel.failure is not None:
                    raise LanewayError(f"loading optimizer state: {parcel.failure}") from parcel.failure
            else:
                own.copy_(value)
            state[name] = own
            kept.append(parcel)
        self._parcels[parameter] = kept


def _moves(value: Any) -> bool:
    """Whether a value of the state is a tensor that can go to a tier: dense, not a scalar, of no wrapper class."""
    return (
        isinstance(value, Tensor)
        and value.dim() > 0
        and value.numel() > 0
        and value.layout is torch.strided
        and not hasattr(type(value), "__tensor_flatten__")
        and value.untyped_storage().resizable()
    )


def _replacement(streamed: StreamedOptimizerState, raw: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(raw)
    def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return streamed.step(*args, **kwargs)

    hooked = Optimizer.profile_hook_step(step)
    hooked.hooked = True  # type: ignore[attr-defined]
    if streamed._replaced is not None:
        hooked._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # schedulers know it as theirs
    return hooked
