"""Tensors that autograd saves, kept, moved or computed again by the books of ``residency``.

One entry stands for one storage at one version, however many saved tensors are views of it. What autograd holds in place of a
saved tensor is a handle; when the last handle of an entry is gone, be it by a backward pass, a dropped graph or an error, so is
the entry.

torch's own check that a saved tensor was not written in place since is off under saved-tensor hooks; handles make it themselves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from laneway.core import LanewayError
from laneway.memory.clock import Clock
from laneway.memory.coding import CodingErrors, Int8
from laneway.memory.config import MIN_BYTES
from laneway.memory.extents import Known, View, key_of, plain, version_of
from laneway.memory.recipe import CHANGED, Kept, Loan, Recipe, check_version
from laneway.memory.residency import Account, Choice, Entry, Residency, Schedule
from laneway.memory.tier import Tier

Observer = Callable[[str, Entry], None]
"""Told of every event of the books before it changes them (save, use or free), and of entries saved again, and the entry."""


class _Body:
    """What an entry's bytes are: the storage while it is resident, and how to make them again."""

    __slots__ = ("changed", "codec", "coded", "device", "dtype", "guard", "key", "recipe", "storage", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.storage: torch.UntypedStorage | None = tensor.untyped_storage()
        self.guard: Tensor | None = tensor.detach()  # shares the version counter
        self.version = version_of(tensor)
        self.key = key_of(tensor)
        self.device, self.dtype = tensor.device, tensor.dtype
        self.codec: Int8 | None = None
        self.coded: torch.UntypedStorage | None = None  # what is being read
        self.recipe: Recipe | None = None
        self.changed = False  # written in place while its copy left

    def check(self) -> None:
        if self.changed:
            raise RuntimeError(CHANGED + "its bytes were written while they moved out")
        if self.guard is not None:
            check_version(self.guard, self.version)


class _Handle:
    """Stands for a saved tensor: a view of an entry."""

    __slots__ = ("__weakref__", "entry", "owner", "view")

    def __init__(self, owner: Activations, entry: Entry, view: View) -> None:
        self.owner, self.entry, self.view = owner, entry, view

    def unpack(self) -> Tensor:
        return self.view.over(self.owner.storage(self.entry))

    def __del__(self) -> None:
        owner = getattr(self, "owner", None)
        if owner is not None:
            owner.release(self.entry)


class Activations:
    """The engine: packs and unpacks for ``torch.autograd.graph.saved_tensors_hooks``.

    Args:
        tier: where moved entries go.
        clock: what stalls are measured on.
        device: tensors of other devices are kept.
        min_bytes: smaller storages are kept.
        protected: says whether a storage must never be touched (parameters and buffers).
        coded: what moves is coded as 8-bit integers where ``coding.Int8`` takes it: lossy.
    """

    def __init__(
        self,
        tier: Tier,
        clock: Clock,
        device: torch.device,
        *,
        min_bytes: int = MIN_BYTES,
        protected: Callable[[Tensor], bool] = lambda tensor: False,
        coded: bool = False,
    ) -> None:
        self.books = Residency(tier, clock, self)
        self.device, self.min_bytes, self.protected = device, min_bytes, protected
        self.errors = CodingErrors() if coded else None
        self.observer: Observer | None = None
        self.known: Known[Entry] = Known()
        self.recipes: Known[Recipe] = Known()
        self._alive = 0
        self._dropped: deque[Entry] = deque()  # handles that went while another thread held the books
        self.extra_bytes = 0  # bytes of saved tensors that were views of an entry already there
        self._index = 0

    def begin(self, schedule: Schedule) -> None:
        """Start a pass. Entries of an earlier one that are still alive keep their state."""
        self.books.begin(schedule)
        self.recipes.clear()
        self._index = 0
        self.extra_bytes = 0
        if self.errors is not None:
            self.errors.begin()

    @property
    def account(self) -> Account:
        """The books of the pass so far."""
        return self.books.account

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """The pair of hooks, to be entered around a forward pass."""
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    # -- what autograd calls

    def pack(self, tensor: Tensor) -> Kept | _Handle:
        """Take what autograd saves."""
        if (
            not plain(tensor)
            or tensor.device != self.device
            or tensor.untyped_storage().nbytes() < self.min_bytes
            or self.protected(tensor)
        ):
            return Kept(tensor)
        with self.books.lock:
            self._see_to_dropped()
            entry = self.known.get(tensor)
            if entry is not None and entry.users and self._same(entry, tensor):
                entry.users += 1
                entry.touched = self.books.event
                self.extra_bytes += tensor.untyped_storage().nbytes()
                if self.observer is not None:
                    self.observer("again", entry)
                return _Handle(self, entry, View.of(tensor))
            return self._new(tensor)

    def _same(self, entry: Entry, tensor: Tensor) -> bool:
        """Whether the entry will hold the bytes of ``tensor``; what may be coded as floats is none of another dtype."""
        body: _Body = entry.body
        return body.version == version_of(tensor) and (self.errors is None or body.dtype == tensor.dtype)

    @staticmethod
    def unpack(held: Kept | _Handle) -> Tensor:
        """Give back what autograd saved."""
        return held.unpack()

    def _new(self, tensor: Tensor) -> _Handle:
        body = _Body(tensor)
        entry = Entry(self._index, tensor.untyped_storage().nbytes(), body)
        self._index += 1
        body.recipe = self.recipes.get(tensor)
        entry.again = body.recipe is not None
        if body.recipe is not None:
            self.recipes.drop(body.key, body.recipe)
            if self.books.schedule.choice(entry.index) is Choice.RECOMPUTE:
                entry.needs = body.recipe.entries()
        if self.observer is not None:
            self.observer("save", entry)
        if self.books.schedule.choice(entry.index) is not Choice.RECOMPUTE:
            body.recipe = None
        self.known.put(tensor, entry)
        self._alive += 1
        handle = _Handle(self, entry, View.of(tensor))
        self.books.save(entry)
        return handle

    # -- what handles call

    def storage(self, entry: Entry) -> torch.UntypedStorage:
        """The entry's bytes, on the device.

        Raises:
            RuntimeError: they were written in place since they were saved.
            LanewayError: the tier lost them.
        """
        entry.body.check()
        if self.observer is not None and not entry.used:
            self.observer("use", entry)
        with self.books.lock:
            self._see_to_dropped()
            self.books.use(entry)
        storage: torch.UntypedStorage | None = entry.body.storage
        if storage is None:
            raise LanewayError(f"a saved tensor of {entry.nbytes} bytes is {entry.state.value} where it is needed")
        return storage

    def release(self, entry: Entry) -> None:
        """A handle is gone.

        Any thread may be the one whose garbage collection finds it, a tier's too, which the thread that holds the books may be
        waiting for: so nobody waits for the books here.
        """
        if not self.books.lock.acquire(blocking=False):
            self._dropped.append(entry)
            return
        try:
            self._release(entry)
        finally:
            self.books.lock.release()

    @property
    def alive(self) -> int:
        """Entries with a handle."""
        with self.books.lock:
            self._see_to_dropped()
            return self._alive

    def _see_to_dropped(self) -> None:
        while self._dropped:
            self._release(self._dropped.popleft())

    def _release(self, entry: Entry) -> None:
        if entry.users == 1:
            if self.observer is not None:
                self.observer("free", entry)
            self._alive -= 1
            self.known.drop(entry.body.key, entry)
        self.books.free(entry)

    # -- hands of the books

    def stored(self, entry: Entry) -> int:
        """Its size, or that of its code."""
        body: _Body = entry.body
        if self.errors is not None and body.codec is None and body.guard is not None:
            body.codec = Int8.of(body.guard)
        return entry.nbytes if body.codec is None else body.codec.stored

    def source(self, entry: Entry) -> torch.UntypedStorage | None:
        """What to write."""
        body: _Body = entry.body
        if body.codec is None or body.storage is None or self.errors is None:
            return body.storage
        coded = body.codec.encode(body.storage)
        self.errors.see(body.codec, coded, body.storage)
        return coded

    def target(self, entry: Entry) -> torch.UntypedStorage:
        """Room to read into."""
        body: _Body = entry.body
        storage = _room(entry.nbytes, body.device)
        if body.codec is not None:
            body.coded = _room(body.codec.stored, body.device)
        body.storage = storage
        return storage if body.coded is None else body.coded

    def came(self, entry: Entry) -> None:
        """Decode it."""
        body: _Body = entry.body
        coded, body.coded = body.coded, None
        if body.codec is not None and coded is not None and body.storage is not None:
            body.codec.decode(coded, body.storage)

    def try_coding(self, entry: Entry) -> tuple[int, float]:
        """Bytes that the entry moves as where that is coded, else 0, and the seconds that coding it takes."""
        body: _Body = entry.body
        stored = self.stored(entry)
        if body.codec is None or body.storage is None:
            return 0, 0.0
        start = self.books.clock.now()
        body.codec.decode(body.codec.encode(body.storage), _room(entry.nbytes, body.device))
        return stored, (self.books.clock.now() - start) / 2

    def let_go(self, entry: Entry) -> None:
        """The bytes are elsewhere, or not needed any more."""
        body: _Body = entry.body
        if body.guard is not None and body.version is not None and body.guard._version != body.version:
            body.changed = True  # what arrived may be torn
        body.storage = body.guard = body.coded = None
        if not entry.users and not entry.needed_by:
            body.recipe = None

    def recompute(self, entry: Entry) -> None:
        """Run the recipe."""
        body: _Body = entry.body
        assert body.recipe is not None
        storage = body.recipe.run().untyped_storage()
        if storage.nbytes() != entry.nbytes:
            raise LanewayError(f"{body.recipe.name}: computed again it has {storage.nbytes()} bytes, not {entry.nbytes}")
        body.storage, body.recipe = storage, None

    # -- what the watch over the modules calls

    def recipe(self, name: str, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Recipe | None:
        """Note that ``module`` made ``output`` of ``inputs``; None where that can't be repeated from what is saved anyway."""
        held = []
        for given in inputs:
            lent = self._lend(given)
            if lent is None and given is not None:
                return None
            held.append(lent)
        found = Recipe(name, module, tuple(held), self.device)
        self.recipes.put(output, found)
        return found

    def _lend(self, given: Any) -> Any:
        """What stands for ``given`` in a recipe; None where it would have to be kept for it alone."""
        if not isinstance(given, Tensor):
            return given
        if not plain(given) or given.device != self.device:
            return None
        entry = self.known.get(given)
        if entry is not None and entry.users and self._same(entry, given):
            return Loan(entry, View.of(given))
        small = given.untyped_storage().nbytes() < self.min_bytes
        return Kept(given) if small or self.protected(given) else None


def _room(nbytes: int, device: torch.device) -> torch.UntypedStorage:
    return torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()
