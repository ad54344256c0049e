"""One rank's failure is every rank's: no rank waits for another that has already given up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from laneway.checkpoint.atomic import explain
from laneway.core import InputError, LanewayError

T = TypeVar("T")


def rank_and_size() -> tuple[int, int]:
    """This process's rank and the number of ranks; (0, 1) where no process group was set up."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def on_all(what: str, folder: Path, action: Callable[[], T]) -> T:
    """Run ``action`` on every rank and return this rank's result; where it fails on one, raise on all.

    Args:
        what: names the work in messages: "saving step 10".
        folder: where it happens, for the advice on a full disk.
        action: must not communicate with other ranks itself.

    Raises:
        InputError: as it was raised, on the ranks where it was.
        LanewayError: everywhere else, naming the first rank that failed; also where another rank is gone.
    """
    result, failure = _attempt(action)
    _raise_on_all(what, failure, gather(what, failure and line(failure, folder)))
    return result  # type: ignore[return-value]  # without a failure it is what the action returned


def on_first(what: str, folder: Path, action: Callable[[], T]) -> T:
    """Run ``action`` on rank 0 and return its result (which must be picklable) on every rank; raises as ``on_all``."""
    result, failure = _attempt(action) if rank_and_size()[0] == 0 else (None, None)
    rows = gather(what, (failure and line(failure, folder), result))
    _raise_on_all(what, failure, [message for message, _ in rows])
    return rows[0][1]


def _attempt(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """The result of ``action``, or the exception it raised."""
    try:
        return action(), None
    except Exception as error:  # noqa: BLE001 - its message is sent to every rank and raised there
        return None, error


def _raise_on_all(what: str, failure: Exception | None, messages: list[str | None]) -> None:
    """Raise on every rank if there is a message of any; ``failure`` is this rank's own."""
    if isinstance(failure, InputError) or (failure and len(messages) == 1 and not isinstance(failure, (OSError, LanewayError))):
        raise failure
    failed = [(rank, message) for rank, message in enumerate(messages) if message is not None]
    if failed:
        rank, message = failed[0]
        where = f" on rank {rank}" if len(messages) > 1 else ""
        raise LanewayError(f"{what} failed{where}: {message}") from failure


def gather(what: str, value: Any) -> list[Any]:
    """``value`` of every rank, by rank. Raises LanewayError where another rank is gone."""
    rank, size = rank_and_size()
    if size == 1:
        return [value]
    rows: list[Any] = [None] * size
    try:
        dist.all_gather_object(rows, value)
    except RuntimeError as error:
        raise lost(what, rank, error) from error
    return rows


def lost(what: str, rank: int, error: BaseException) -> LanewayError:
    """The error for a rank that cannot reach another one any more."""
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return LanewayError(f"{what}: rank {rank} lost contact with another rank, which was probably killed ({first})")


def line(error: BaseException, folder: Path) -> str:
    """An exception in one line."""
    if isinstance(error, OSError):
        return explain(error, folder)
    text = " ".join(str(error).split())
    return text if isinstance(error, LanewayError) else f"{type(error).__name__}: {text}"
