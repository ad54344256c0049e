"""An optimizer step that runs out of memory is repeated exactly, never left half done.

An optimizer writes moments and parameters and allocates in between, so a failure in the middle leaves neither the old state nor
the new. The step is therefore taken a few parameters at a time; before each, what it may change is copied, and put back where it
fails. A fused implementation allocates nothing between its writes once its state is there: of it only the step counts are copied.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

from laneway.core import LanewayError
from laneway.memory.oom import Failure, out_of_memory

CHUNK = 16 << 20  # bytes of parameters that are stepped together

PER_PARAMETER = tuple(
    getattr(torch.optim, name)
    for name in (
        *("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta"),
        *("Adagrad", "RMSprop", "ASGD", "Rprop", "Adafactor", "Muon"),
    )
    if hasattr(torch.optim, name)
)
"""Optimizers that look at one parameter at a time: stepping some and then the others is the same, bit for bit."""

Again = Callable[[Failure, float], None]


def step_exactly(optimizer: torch.optim.Optimizer, again: Again, *, attempts: int = 3, chunk_bytes: int = CHUNK) -> None:
    """``optimizer.step()``, with the same bits however often allocations in it fail.

    Optimizers of torch that look at one parameter at a time (``PER_PARAMETER``) and have no step hooks go by chunks; any other
    goes whole, with copies of all its parameters, gradients and state. A copy lies on the device, from the second try on in the
    host's memory where that is another. Costs one copy of parameters and state a step within the device, next to nothing with
    ``fused=True``.

    Args:
        optimizer: without a closure.
        again: called between a failure and the next try with the time the failed one began: to make room.
        attempts: how often a chunk is tried; halves of it as often again.
        chunk_bytes: of parameters in a chunk.

    Raises:
        LanewayError: a chunk does not fit. Its parameters and state are as before; chunks before it are done, as the error says.
    """
    apart = (
        isinstance(optimizer, PER_PARAMETER) and type(optimizer).__module__.startswith("torch.optim") and not _hooked(optimizer)
    )
    chunks = _chunks(optimizer, chunk_bytes) if apart else [_Chunk(optimizer, None, _all(optimizer))]
    done = 0
    while chunks:
        chunk = chunks.pop(0)
        failure = _step_chunk(chunk, again, attempts)
        if failure is None:
            done += 1
        elif len(chunk.parameters) > 1 and chunk.group is not None:
            half = len(chunk.parameters) // 2
            chunks[:0] = [chunk.of(chunk.parameters[:half]), chunk.of(chunk.parameters[half:])]
        else:
            part = "nothing was changed" if not done else "other parameters were stepped: go on from the last checkpoint"
            raise LanewayError(
                f"out of memory in optimizer.step, {failure.where}, in each of {attempts} tries: {failure.wanted} bytes more "
                f"were needed; {part}; make the optimizer with fused=True, or keep its state in a tier"
            ) from failure.error


class _Chunk:
    """Parameters of one group (or of all, group None) that are stepped together."""

    def __init__(self, optimizer: torch.optim.Optimizer, group: dict[str, Any] | None, parameters: list[nn.Parameter]) -> None:
        self.optimizer, self.group, self.parameters = optimizer, group, parameters

    def of(self, parameters: list[nn.Parameter]) -> _Chunk:
        """Another one of the same group."""
        return _Chunk(self.optimizer, self.group, parameters)

    @property
    def fused(self) -> bool:
        """Whether its step allocates nothing between its writes."""
        there = all(self.optimizer.state.get(p) for p in self.parameters)
        return self.group is not None and bool(self.group.get("fused")) and there

    @contextmanager
    def alone(self) -> Generator[None]:
        """Within, the optimizer has these parameters and no others."""
        if self.group is None:
            yield
            return
        groups, parameters = self.optimizer.param_groups, self.group["params"]
        self.optimizer.param_groups, self.group["params"] = [self.group], self.parameters
        try:
            yield
        finally:
            self.optimizer.param_groups, self.group["params"] = groups, parameters


def _step_chunk(chunk: _Chunk, again: Again, attempts: int) -> Failure | None:
    """Step it; the failure where that did not go in so many tries, with everything as before."""
    failure: Failure | None = None
    for attempt in range(attempts):
        began = time.perf_counter()
        before: _Before | None = None
        try:
            before = _Before(chunk, on_host=attempt > 0)
            with chunk.alone():
                chunk.optimizer.step()
            return None
        except Exception as error:
            if not out_of_memory(error):
                raise
            failure = Failure.of(error)
        if before is not None:
            before.restore()
            before = None
        again(failure, began)
    return failure


class _Before:
    """What a chunk's step may change, copied."""

    def __init__(self, chunk: _Chunk, *, on_host: bool) -> None:
        self.chunk = chunk
        state = chunk.optimizer.state
        self._states = {p: dict(state[p]) for p in chunk.parameters if p in state}
        groups = chunk.optimizer.param_groups if chunk.group is None else [chunk.group]
        self._groups = [(group, dict(group)) for group in groups]
        own = [_local(value) for held in self._states.values() for value in held.values() if isinstance(value, Tensor)]
        tensors = [*[_local(p) for p in chunk.parameters], *own]
        if chunk.group is None:
            tensors += [_local(p.grad) for p in chunk.parameters if p.grad is not None]
        self._untouched: list[tuple[Tensor, int]] = []
        if chunk.fused:
            self._untouched = [(t, t._version) for t in tensors if t.numel() > 1]
            tensors = [t for t in tensors if t.numel() <= 1]
        self._copies = _copied(tensors, on_host)

    @torch.no_grad()
    def restore(self) -> None:
        """Put it back. Allocates nothing.

        Raises:
            LanewayError: a fused step failed after it had begun to write.
        """
        for tensor, version in self._untouched:
            if tensor._version != version:
                raise LanewayError(
                    "out of memory in the middle of a fused optimizer step, whose parameters were not copied: go on from the "
                    "last checkpoint, with fused=False"
                )
        for group, fields in self._groups:
            group.update(fields)
        state = self.chunk.optimizer.state
        for parameter in self.chunk.parameters:
            if parameter in self._states:
                state[parameter].clear()
                state[parameter].update(self._states[parameter])
            elif parameter in state:
                del state[parameter]
        for tensor, copy in self._copies:
            tensor.copy_(copy)


@torch.no_grad()
def _copied(tensors: Sequence[Tensor], on_host: bool) -> list[tuple[Tensor, Tensor]]:
    """Each tensor with a copy of it; the copies of one dtype and device in one block."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    found = []
    for (dtype, device), alike in kinds.items():
        block = torch.empty(sum(t.numel() for t in alike), dtype=dtype, device="cpu" if on_host else device)
        end = 0
        for tensor in alike:
            copy = block[end : end + tensor.numel()].view(tensor.shape)
            copy.copy_(tensor)
            found.append((tensor, copy))
            end += tensor.numel()
    return found


def _chunks(optimizer: torch.optim.Optimizer, chunk_bytes: int) -> list[_Chunk]:
    """Neighbours of one group up to ``chunk_bytes``; all of a fused group whose state is there."""
    found: list[_Chunk] = []
    for group in optimizer.param_groups:
        parameters = [p for p in group["params"] if p.grad is not None]
        whole = _Chunk(optimizer, group, parameters)
        if parameters and whole.fused:
            found.append(whole)
            continue
        chunk: list[nn.Parameter] = []
        size = 0
        for parameter in parameters:
            nbytes = parameter.numel() * parameter.element_size()
            if chunk and size + nbytes > chunk_bytes:
                found.append(whole.of(chunk))
                chunk, size = [], 0
            chunk.append(parameter)
            size += nbytes
        if chunk:
            found.append(whole.of(chunk))
    return found


def _all(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _hooked(optimizer: torch.optim.Optimizer) -> bool:
    """Whether anyone asked to be called at every step: with all parameters, once."""
    own = getattr(optimizer, "_optimizer_step_pre_hooks", {}) or getattr(optimizer, "_optimizer_step_post_hooks", {})
    others = getattr(torch_optimizer, "_global_optimizer_pre_hooks", {}) or getattr(
        torch_optimizer, "_global_optimizer_post_hooks", {}
    )
    return bool(own or others)


def _local(tensor: Any) -> Tensor:
    """This rank's part of a sharded tensor; another one itself, without its graph."""
    found: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found.detach()
