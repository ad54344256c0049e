"""Counts live storages operator by operator and takes down how each was made: ``other`` bytes and recompute costs of traces."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from laneway.memory.trace import Entry, Event

SMALL = 64 << 10
"""Inputs below this many bytes are taken to be there."""
LONGEST_CHAIN = 3
"""Operators that one recomputation may run through."""


@dataclass(eq=False)
class _Storage:
    """One storage: its bytes, which entry it is, and how it came to be."""

    reference: StorageWeakRef
    nbytes: int
    seconds: float | None = None  # None: it was there before, or can't be made again
    sources: list[_Storage] = field(default_factory=list)
    entry: int | None = None


class Census(TorchDispatchMode):
    """Watches every operator, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[StorageWeakRef, _Storage] = {}
        self._entries: dict[int, _Storage] = {}
        self._claimed: dict[StorageWeakRef, int] = {}
        self._level = self._top = 0

    def begin(self, tensors: Iterable[Tensor]) -> None:
        """What lives already."""
        for tensor in tensors:
            self._meet(tensor)
        self.restart()

    def claim(self, reference: StorageWeakRef, entry: int) -> None:
        """This storage is that entry."""
        storage = self._known.get(reference)
        if storage is None:
            self._claimed[reference] = entry
        else:
            storage.entry = entry
            self._entries[entry] = storage

    def top(self) -> int:
        """Most bytes alive at once since ``restart``."""
        return self._top

    def restart(self) -> None:
        """Look from here on."""
        self._sweep()
        self._top = self._level

    def _sweep(self) -> None:
        for reference in [reference for reference in self._known if reference.expired()]:
            self._level -= self._known.pop(reference).nbytes

    def _meet(self, tensor: Tensor) -> _Storage:
        held = tensor.untyped_storage()
        reference = StorageWeakRef(held)
        storage = self._known.get(reference)
        if storage is None:
            storage = self._known[reference] = _Storage(reference, held.nbytes())
            self._level += storage.nbytes
            entry = self._claimed.pop(reference, None)
            if entry is not None:
                storage.entry, self._entries[entry] = entry, storage
        return storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, timed; take down its storages."""
        sources = [self._meet(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        start = time.thread_time()
        result = func(*args, **(kwargs or {}))
        seconds = time.thread_time() - start
        self._sweep()
        known = set(map(id, sources))
        again = torch.Tag.nondeterministic_seeded not in func.tags
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = self._meet(leaf)
                if id(storage) not in known and again and storage.seconds is None:
                    storage.seconds, storage.sources = seconds, list(dict.fromkeys(sources))
        if func._schema.is_mutable:
            for place, argument in enumerate(func._schema.arguments):
                changed = args[place] if place < len(args) else (kwargs or {}).get(argument.name)
                if argument.alias_info is not None and argument.alias_info.is_write and isinstance(changed, Tensor):
                    self._meet(changed).seconds = None
        self._top = max(self._top, self._level)
        return result

    def costs(self, entries: Sequence[Entry], events: Sequence[Event]) -> list[Entry]:
        """The entries with what recomputing them costs, where that is possible at their last use."""
        last_use = {event.entry: index for index, event in enumerate(events) if event.action == "use"}
        ends = {event.entry: index for index, event in enumerate(events) if event.action == "free"}
        produced: dict[int, list[int]] = {}
        for index, event in enumerate(events):
            if event.action == "produce":
                produced.setdefault(event.entry, []).append(index)
        found = []
        for number, entry in enumerate(entries):
            storage = self._entries.get(number)
            if entry.kind in ("activation", "kv") and storage is not None and number in last_use:
                born, until = produced[number][0], last_use[number]

                def there(other: int, born: int = born, until: int = until) -> bool:
                    writes = produced.get(other, [])
                    before = other not in ends or ends[other] > until
                    made = not writes or writes[0] < born or entries[other].kind == "parameter"
                    return before and made and not any(born < write < until for write in writes)

                chain = _chain(storage, there, LONGEST_CHAIN)
                if chain is not None and chain[0] > 0:
                    entry = entry._replace(recompute_seconds=chain[0], inputs=tuple(sorted(chain[1])))
            found.append(entry)
        return found


def _chain(storage: _Storage, there: Any, longest: int) -> tuple[float, set[int]] | None:
    """Seconds and entries that make ``storage`` again; None where that can't be done."""
    if storage.seconds is None or longest == 0:
        return None
    seconds, inputs = storage.seconds, set[int]()
    for source in storage.sources:
        if source.nbytes < SMALL:
            continue
        if source.entry is not None and there(source.entry):
            inputs.add(source.entry)
            continue
        below = _chain(source, there, longest - 1)
        if below is None:
            return None
        seconds += below[0]
        inputs |= below[1]
    return seconds, inputs
