"""Out of memory: how to tell it from other errors, what it asked for, and how to let go of what it holds."""

from __future__ import annotations

import ctypes
import gc
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from laneway.core import ASKED_MEMORY
from laneway.memory.counting import CountingAllocator

_TEXTS = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "std::bad_alloc",
    "bad allocation",
)
_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
_UNITS = {"bytes": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


def out_of_memory(error: BaseException) -> bool:
    """Whether ``error``, or one that it was raised from or while handling, says that memory could not be allocated.

    That is ``torch.OutOfMemoryError`` (accelerators, the counting allocator), ``MemoryError``, and a RuntimeError with the text
    of torch's CPU allocator or of ``std::bad_alloc``. Nothing else is.
    """
    return any(_says_so(link) for link in _chain(error))


def wanted_bytes(error: BaseException) -> int:
    """Bytes that the failed allocation asked for, as its message says; 0 where it does not."""
    for link in _chain(error):
        found = ASKED_MEMORY.search(str(link))
        if found is not None:
            return int(float(found[1]) * _UNITS[found[2].lower()])
    return 0


@dataclass(frozen=True)
class Failure:
    """An allocation that failed.

    Attributes:
        error: what was raised, without its traceback, which is in its notes as text.
        wanted: bytes asked for, 0 where unknown.
        where: function, file and line of the innermost Python frame that is neither torch's nor ours.
    """

    error: BaseException
    wanted: int
    where: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Take note of ``error`` and take the frames off it, and off what it was raised from: they hold the graph.

        Emptying the frames would not do: a frame holds its function, and that the variables of the function around it.
        """
        where = "?"
        for number, link in enumerate(_chain(error)):
            if link.__traceback__ is not None:
                frames = traceback.extract_tb(link.__traceback__)
                link.add_note("It came through (innermost last):\n" + "".join(traceback.format_list(frames)))
                where = _where(frames) if number == 0 else where
            traceback.clear_frames(link.__traceback__)
            link.__traceback__ = None
        return cls(error, wanted_bytes(error), where)


def free_unused(device: torch.device) -> None:
    """Give back what is held and not used: unreachable objects, autocast's copies, blocks that allocators keep.

    Takes a fraction of a second where there are millions of objects.
    """
    gc.collect()
    torch.clear_autocast_cache()
    free_caches(device)


def free_caches(device: torch.device) -> None:
    """Give back the blocks that allocators keep."""
    counting = CountingAllocator.installed()
    if counting is not None:
        counting.empty_cache()
    if device.type != "cpu":
        torch.accelerator.empty_cache()
    elif sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc alone has it
        if trim is not None:
            trim(0)


def _where(frames: traceback.StackSummary) -> str:
    theirs = [frame for frame in frames if not frame.filename.startswith(_OURS)]
    frame = (theirs or frames)[-1]
    return f"{frame.name} ({Path(frame.filename).name}:{frame.lineno})"


def _says_so(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, then what each was raised from, or else while handling what."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ if link.__cause__ is not None or link.__suppress_context__ else link.__context__
