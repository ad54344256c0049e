"""A storage whose bytes go to a tier and come back into the same storage."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from laneway.memory.away import mark_away, mark_here
from laneway.memory.tier import Slot, Tier, TierFullError, Transfer

_log = logging.getLogger("laneway")


class Where(Enum):
    """Where the bytes are."""

    HERE = "here"
    LEAVING = "leaving"  # here, being written; the tensors may not be used
    AWAY = "away"
    COMING = "coming"  # room is taken, being read
    DROPPED = "dropped"


@dataclass
class Books:
    """Bytes that take room on the device now, and the most that ever did."""

    resident: int = 0
    peak: int = 0

    def add(self, nbytes: int) -> None:
        """So many more; negative: fewer."""
        self.resident += nbytes
        self.peak = max(self.peak, self.resident)


class Parcel:
    """Some tensors of one storage, all that use it except views that autograd saved.

    Its room in the tier is kept from the first time it leaves until ``drop``.

    Args:
        books: told when its bytes come and go.

    Attributes:
        nbytes: size of the storage.
    """

    def __init__(self, tier: Tier, tensors: Sequence[Tensor], books: Books) -> None:
        self.tier, self.tensors, self.books = tier, list(tensors), books
        self.storage = tensors[0].untyped_storage()
        self.nbytes = self.storage.nbytes()
        self._where = Where.HERE
        books.add(self.nbytes)
        self.failure: BaseException | None = None
        self._slot: Slot | None = None
        self._transfer: Transfer | None = None

    @property
    def where(self) -> Where:
        """Where the bytes are."""
        return self._where

    @where.setter
    def where(self, where: Where) -> None:
        before, self._where = self.resident, where
        self.books.add((self.resident - before) * self.nbytes)

    @property
    def resident(self) -> bool:
        """Whether its bytes take room on the device."""
        return self.where in (Where.HERE, Where.LEAVING, Where.COMING)

    @property
    def shared(self) -> bool:
        """Whether something else refers to the storage too: then sending it away would free nothing, or hurt that."""
        return torch._C._storage_Use_Count(self.storage._cdata) > len(self.tensors) + 1

    def send(self) -> bool:
        """Begin to write it out; False where the tier is full (it stays here)."""
        if self.where is not Where.HERE:
            return self.where is not Where.DROPPED
        if not self._take_slot():
            return False
        for tensor in self.tensors:
            mark_away(tensor)
        self._write(self.storage)
        return True

    def send_from(self, source: torch.UntypedStorage) -> bool:
        """As ``send``, with the bytes of ``source`` instead of its own; its own are given up at once."""
        if not self._take_slot():
            return False
        for tensor in self.tensors:
            mark_away(tensor)
        self.storage.resize_(0)
        self._write(source)
        return True

    def fetch(self) -> None:
        """Begin to bring it back: its tensors may be used after ``arrive``. What is only just leaving stays."""
        if self.where is Where.LEAVING:
            assert self._transfer is not None
            if self._transfer.cancel():
                self._transfer = None
                self._stay()
                return
            self._finish()
        if self.where is Where.AWAY:
            assert self._slot is not None
            self.storage.resize_(self.nbytes)
            self.where, self.failure = Where.COMING, None
            self._transfer = self.tier.read(self._slot, self.storage, self._came)

    def arrive(self) -> None:
        """Wait until it is here.

        Raises:
            Exception: what kept its bytes from being read; they are still in the tier.
        """
        if self.where in (Where.LEAVING, Where.AWAY):
            self.fetch()
        if self.where is Where.COMING:
            assert self._transfer is not None
            self._transfer.wait()

    def settle(self) -> None:
        """Wait for the copy that is under way, if one is; a write that failed leaves it here."""
        if self.where is Where.LEAVING:
            self._finish()
        elif self.where is Where.COMING:
            self.arrive()

    def copy(self) -> torch.UntypedStorage:
        """Its bytes in host memory, wherever they are, leaving it there."""
        self.settle()
        target = torch.UntypedStorage(self.nbytes)
        if self.where is Where.AWAY:
            assert self._slot is not None
            self.tier.read(self._slot, target, lambda error: None).wait()
        else:
            target.copy_(self.storage)
        return target

    def drop(self) -> None:
        """Give up its room in the tier; what is away is lost."""
        if self.where is Where.DROPPED:
            return
        slot, self._slot = self._slot, None
        if self._transfer is not None and not self._transfer.done:
            self._transfer.cancel()
        if self.where is Where.LEAVING:
            self._stay()
        if self.where is not Where.HERE:
            self.tensors.clear()
        self.where = Where.DROPPED
        if slot is not None:
            self.tier.release(slot)

    def _take_slot(self) -> bool:
        if self._slot is None:
            try:
                self._slot = self.tier.allocate(self.nbytes)
            except TierFullError:
                return False
        return True

    def _write(self, source: torch.UntypedStorage) -> None:
        assert self._slot is not None
        self.where = Where.LEAVING
        own = source is self.storage
        self._transfer = self.tier.write(self._slot, source, lambda error: self._left(error, own))

    def _finish(self) -> None:
        """Wait for the write. What went wrong with it is in ``failure``; nothing is lost, it stays here."""
        assert self._transfer is not None
        try:
            self._transfer.wait()
        except Exception:
            if self.failure is None:
                raise

    def _left(self, error: BaseException | None, own: bool) -> None:
        if self.where is not Where.LEAVING:
            return
        self._transfer, self.failure = None, error
        if error is None:
            self.where = Where.AWAY
            self.storage.resize_(0)
        elif own:
            _log.warning(
                "a tensor of %d bytes stays where it is, writing it to the %s tier failed: %s", self.nbytes, self.tier.name, error
            )
            self._stay()
        else:
            self.where = Where.AWAY

    def _came(self, error: BaseException | None) -> None:
        if self.where is not Where.COMING:
            return
        self._transfer, self.failure = None, error
        if error is None:
            self._stay()
        else:
            self.where = Where.AWAY
            self.storage.resize_(0)

    def _stay(self) -> None:
        self.where = Where.HERE
        for tensor in self.tensors:
            mark_here(tensor)
