"""Records traces (``laneway.memory.trace``) of real training steps: small models, real operators, measured times.

An activation is what autograd saves, one entry a storage: known by a weak reference to the storage (an address alone is handed
out again) and its version. It lives from its first save until autograd has dropped the last of them. Parameters are used when
their module runs, and when the backward pass asks for them; gradients, and the two moments of AdamW, are produced and used
module by module. Storages under 64 KiB are nobody's entry: their bytes, and those of everything else that lives, are the
``other`` bytes of an event.

A model runs several times from the same start. One run counts bytes and takes down, operator by operator, what a storage was made
of and in which time, which is what recomputing it would cost; the others measure the gaps between events in CPU time of the
thread (the median of the runs). All of them must see the same events.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from laneway.bench.policy_census import Census
from laneway.core import LanewayError
from laneway.memory.config import MIN_BYTES
from laneway.memory.trace import Entry, Event, Trace

MERGE = 2e-5
"""Gaps shorter than this, in seconds, are no compute of their own: they count with the next one."""


@dataclass
class Workload:
    """A model on its batches; ``step`` runs forward and backward of one batch."""

    model: nn.Module
    batches: Sequence[Any]
    loss: Callable[[nn.Module, Any], Tensor]
    lr: float = 1e-3


@dataclass
class _Saved:
    """What autograd holds in place of a tensor. Its end is the end of the save."""

    recorder: Recorder
    tensor: Tensor
    version: int
    entry: int | None
    counted: bool

    def __del__(self) -> None:
        if self.counted and self.entry is not None:
            self.recorder.dropped(self.entry)


@dataclass
class Recorder:
    """Takes down the events of a workload's steps."""

    workload: Workload
    census: Census | None = None
    entries: list[Entry] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._saves: dict[int, int] = {}
        self._keys: dict[int, tuple[StorageWeakRef, int]] = {}
        self._activations: dict[tuple[StorageWeakRef, int], int] = {}
        self._parameters: dict[StorageWeakRef, int] = {}
        self._moments: dict[int, int] = {}
        self._gradients: dict[int, int] = {}
        self._depths: dict[str, int] = {}
        self._stack: list[str] = [""]
        self._managed = 0
        self._last = 0.0
        self._optimizers: list[tuple[str, list[nn.Parameter], torch.optim.AdamW]] = []
        self._prepare()

    def _prepare(self) -> None:
        seen: set[int] = set()
        for name, module in self.workload.model.named_modules():
            module.register_forward_pre_hook(lambda module, _, name=name: self._enter(module, name))
            module.register_forward_hook(lambda *_: self._leave())
            own = [p for p in module.parameters(recurse=False) if id(p) not in seen]
            seen.update(map(id, own))
            if own:
                self._optimizers.append((name, own, _optimizer(own, self.workload.lr)))
            for parameter in own:
                parameter.register_post_accumulate_grad_hook(lambda p, name=name: self._gradient(p, name))

    # Events

    def _add(self, action: str, entry: int) -> None:
        start = time.thread_time()
        nbytes, other = self.entries[entry].nbytes, 0
        live = entry in self._live
        if self.census is not None:
            other = max(self.census.top() - self._managed - (0 if live else nbytes), 0)
        self.events.append(Event(start - self._last, action, entry, other))
        if action == "free":
            self._live.discard(entry)
            self._managed -= nbytes
        elif not live:
            self._live.add(entry)
            self._managed += nbytes
        if self.census is not None:
            self.census.restart()
        self._last = time.thread_time()

    def _new(self, nbytes: int, kind: str, module: str) -> int:
        self.entries.append(Entry(nbytes, kind, module, self._depth(module)))
        return len(self.entries) - 1

    def _depth(self, module: str) -> int:
        return self._depths.setdefault(module, len(self._depths))

    def _enter(self, module: nn.Module, name: str) -> None:
        self._stack.append(name)
        self._depth(name)
        for parameter in module.parameters(recurse=False):
            entry = self._parameters.get(StorageWeakRef(parameter.untyped_storage()))
            if entry is not None:
                self._add("use", entry)

    def _leave(self) -> None:
        self._stack.pop()

    def _pack(self, tensor: Tensor) -> _Saved:
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)
        saved = _Saved(self, tensor.detach(), tensor._version, self._parameters.get(reference), False)
        if saved.entry is not None or storage.nbytes() < MIN_BYTES:
            return saved
        key = reference, saved.version
        entry = self._activations.get(key)
        if entry is None:
            entry = self._new(storage.nbytes(), "activation", self._stack[-1])
            self._activations[key], self._keys[entry], self._saves[entry] = entry, key, 0
            if self.census is not None:
                self.census.claim(reference, entry)
            self._add("produce", entry)
        else:
            self._add("use", entry)
        self._saves[entry] += 1
        saved.entry, saved.counted = entry, True
        return saved

    def _unpack(self, saved: _Saved) -> Tensor:
        if saved.tensor._version != saved.version:
            raise LanewayError("a tensor was changed in place after autograd saved it: such a step can't be recorded")
        if saved.entry is not None:
            self._add("use", saved.entry)
        return saved.tensor

    def dropped(self, entry: int) -> None:
        """One save of ``entry`` has ended."""
        self._saves[entry] -= 1
        if not self._saves[entry]:
            del self._activations[self._keys.pop(entry)]
            self._add("free", entry)

    def _gradient(self, parameter: nn.Parameter, module: str) -> None:
        assert parameter.grad is not None
        if not self._recording or parameter.grad.nbytes < MIN_BYTES:
            return
        entry = self._gradients.get(id(parameter))
        if entry is None:
            entry = self._gradients[id(parameter)] = self._new(parameter.grad.nbytes, "gradient", module)
            if self.census is not None:
                self.census.claim(StorageWeakRef(parameter.grad.untyped_storage()), entry)
        self._add("produce", entry)

    # Steps

    _recording = False

    def run(self, warm: int, count: int) -> None:
        """``warm`` steps unrecorded, then ``count`` recorded ones, over the batches in order."""
        batches = iter(self.workload.batches)
        for _ in range(warm):
            self._step(next(batches))
        self._begin()
        with _without_collector(), self.census or nullcontext():
            for _ in range(count):
                self.steps.append(len(self.events))
                with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                    loss = self.workload.loss(self.workload.model, next(batches))
                loss.backward()
                del loss
                self._update()
        self._recording = False

    def _begin(self) -> None:
        """From here on everything that lives is known."""
        self._live: set[int] = set()
        for module, own, optimizer in self._optimizers:
            for parameter in own:
                if parameter.nbytes < MIN_BYTES:
                    continue
                kind = "expert" if ".experts." in module else "parameter"
                entry = self._new(parameter.nbytes, kind, module)
                self._parameters[StorageWeakRef(parameter.untyped_storage())] = entry
                moments = [s for s in optimizer.state[parameter].values() if s.nbytes == parameter.nbytes]
                self._moments[id(parameter)] = self._new(sum(s.nbytes for s in moments), "optimizer", module)
        self._live.update(range(len(self.entries)))
        self._managed = sum(entry.nbytes for entry in self.entries)
        if self.census is not None:
            for reference, entry in self._parameters.items():
                self.census.claim(reference, entry)
            states = [s for _, own, optimizer in self._optimizers for p in own for s in optimizer.state[p].values()]
            self.census.begin([*self.workload.model.parameters(), *self.workload.model.buffers(), *states])
        self._recording, self._last = True, time.thread_time()

    def _step(self, batch: Any) -> None:
        self.workload.loss(self.workload.model, batch).backward()
        self._update()

    def _update(self) -> None:
        for _, own, optimizer in self._optimizers:
            with_gradient = [p for p in own if p.grad is not None]
            large = [p for p in with_gradient if self._recording and p.nbytes >= MIN_BYTES]
            for parameter in large:
                for entry in self._state(parameter):
                    self._add("use", entry)
            if with_gradient:
                optimizer.step()
            for parameter in large:
                own_entry, _, moments = self._state(parameter)
                self._add("produce", own_entry)
                self._add("produce", moments)
            for parameter in with_gradient:
                parameter.grad = None
                if self._recording and id(parameter) in self._gradients:
                    self._add("free", self._gradients.pop(id(parameter)))

    def _state(self, parameter: nn.Parameter) -> tuple[int, int, int]:
        own = self._parameters[StorageWeakRef(parameter.untyped_storage())]
        return own, self._gradients[id(parameter)], self._moments[id(parameter)]


def _optimizer(own: list[nn.Parameter], lr: float) -> torch.optim.AdamW:
    """AdamW of one module, its moments there from the start."""
    optimizer = torch.optim.AdamW(own, lr=0.0, weight_decay=0.0, foreach=False)
    for parameter in own:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for parameter in own:
        parameter.grad = None
    for group in optimizer.param_groups:
        group["lr"] = lr
    return optimizer


@contextmanager
def _without_collector() -> Generator[None]:
    """Saves must end when autograd drops them, not when the collector comes by."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def record(name: str, make: Callable[[], Workload], *, warm: int = 1, steps: int = 4, repeats: int = 3) -> Trace:
    """The trace of ``steps`` training steps of what ``make`` builds (the same every time it is called).

    Raises:
        LanewayError: runs differ in their events, or a saved tensor is changed in place.
    """
    counted = Recorder(make(), Census())
    counted.run(warm, steps)
    assert counted.census is not None
    runs = []
    for _ in range(repeats):
        timed = Recorder(make())
        timed.run(warm, steps)
        if [e[1:3] for e in timed.events] != [e[1:3] for e in counted.events] or timed.entries != counted.entries:
            raise LanewayError(f"{name}: two runs of the same steps differ in what they saved; the model must be deterministic")
        runs.append([event.gap for event in timed.events])
    gaps = _merged([statistics.median(gap) for gap in zip(*runs, strict=True)])
    events = tuple(event._replace(gap=gap) for event, gap in zip(counted.events, gaps, strict=True))
    entries = counted.census.costs(counted.entries, events)
    return Trace(name, tuple(entries), events, tuple(counted.steps))


def _merged(gaps: Sequence[float]) -> list[float]:
    found, carried = [], 0.0
    for gap in gaps:
        carried += max(gap, 0.0)
        found.append(carried if carried >= MERGE else 0.0)
        carried = 0.0 if carried >= MERGE else carried
    return found
