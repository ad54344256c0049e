"""Batches before they are needed, without losing one on resume. No torch here."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from laneway.core import LanewayError, positive_int
from laneway.memory.signature import Signature

Batch = TypeVar("Batch")


class LookAhead(Generic[Batch]):
    """Iterator over the batches of ``source`` that holds up to ``k`` of them ahead.

    ``state_dict`` is the source's own, as it was before the oldest batch that was fetched and not yet given out: a resumed run
    goes on with the very next batch. An error of the source comes when the batch that it belongs to is due, not earlier.

    Args:
        source: any iterator or loader. For ``state_dict`` it must have ``state_dict`` and ``load_state_dict``; the former is then
            called once a batch.
        k: batches to hold ahead, ≥ 1; they take host memory.
        sign: the signature of a batch.
    """

    def __init__(self, source: Iterable[Batch], k: int, sign: Callable[[Batch], Signature] = Signature.of) -> None:
        self.source, self.k, self.sign = source, positive_int("k", k), sign
        self._has_state = hasattr(source, "state_dict") and hasattr(source, "load_state_dict")
        self._restart()

    def _restart(self) -> None:
        self._iterator: Iterator[Batch] | None = None
        self._held: deque[tuple[Batch, Signature, Any]] = deque()
        self._end: tuple[Exception, Any] | None = None
        self._given = False

    def __iter__(self) -> LookAhead[Batch]:
        """A loop that is begun again goes on with the next batch where the source is an iterator or has a state.

        Any other source starts again, as it would without this class.
        """
        if self._given and not isinstance(self.source, Iterator):
            pending = bool(self._held or self._end)
            if pending and self._has_state:
                self.source.load_state_dict(self.state_dict())  # type: ignore[attr-defined]
            self._restart()
        return self

    def __next__(self) -> Batch:
        self._fill(1)
        if not self._held:
            assert self._end is not None
            error, self._end = self._end[0], None
            raise error
        batch, _, _ = self._held.popleft()
        self._given = True
        self._fill(self.k)
        return batch

    def __len__(self) -> int:
        return len(self.source)  # type: ignore[arg-type]

    def upcoming(self) -> list[Signature]:
        """Signatures of the next batches, the first first; fewer than ``k`` at the end of the source."""
        self._fill(self.k)
        return [signature for _, signature, _ in self._held]

    def state_dict(self) -> Any:
        """The source's state as if nothing had been fetched ahead; raises LanewayError where the source has none."""
        self._resumable()
        if self._held:
            return copy.deepcopy(self._held[0][2])
        return copy.deepcopy(self._end[1]) if self._end else self._state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Drop what was fetched and set the source; raises LanewayError where it has no state."""
        self._resumable()
        self._restart()
        self.source.load_state_dict(state)  # type: ignore[attr-defined]

    def _resumable(self) -> None:
        if not self._has_state:
            raise LanewayError(f"{type(self.source).__name__} has no state_dict and load_state_dict: it can't be resumed")

    def _state(self) -> Any:
        return copy.deepcopy(self.source.state_dict()) if self._has_state else None  # type: ignore[attr-defined]

    def _fill(self, count: int) -> None:
        """Fetch until ``count`` batches are held or the source ends."""
        if self._iterator is None:
            self._iterator = iter(self.source)
        while len(self._held) < count and self._end is None:
            before = self._state()
            try:
                batch = next(self._iterator)
                self._held.append((batch, self.sign(batch), before))
            except Exception as error:  # noqa: BLE001 - it is raised when its batch is due
                self._end = (error, before)
