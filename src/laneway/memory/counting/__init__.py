"""Exact bytes of torch's CPU tensors: an allocator that counts, with a limit, a cache, a log and failures on request.

On a machine without an accelerator it makes the CPU a device: ``live`` and ``peak`` are to the byte what tensors asked for, the
CPU's twins of ``torch.accelerator.memory_allocated`` and ``max_memory_allocated``, and an allocation over the limit raises
``torch.OutOfMemoryError`` as an accelerator's does.

Not counted: tensors made before it was installed, memory that torch did not allocate (NumPy's, a library's scratch, a mapped
file) and tensors in shared memory.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from ctypes import POINTER, c_double, c_int, c_int64, c_void_p
from pathlib import Path
from typing import NamedTuple

from laneway.core import InputError, LanewayError, positive_int
from laneway.native import Built, Library

BIG = 64 << 10
"""Blocks of this many bytes or more are whole pages of their own."""
_UNLIMITED = 2**63 - 1
_SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "install": (c_int, [c_int]),
    **dict.fromkeys(("live", "peak", "allocations", "refused", "cached", "limit", "fails_in", "logged", "kept"), (c_int64, [])),
    "set_limit": (None, [c_int64]),
    "reset_peak": (None, []),
    "empty_cache": (None, []),
    "fail_at": (None, [c_int64, c_int64]),
    "mapped": (c_int64, [c_void_p]),
    "record": (c_int, [c_int64]),
    "events": (c_int64, [POINTER(c_double), POINTER(c_int64), c_int64]),
}
_WITHOUT_GIL = ("empty_cache", "events", "record")  # these may take milliseconds; the others are too short to let it go for


class Event(NamedTuple):
    """One allocation or release: seconds of ``time.monotonic`` and bytes, negative where they were freed."""

    seconds: float
    nbytes: int


@functools.cache
def library() -> Library:
    """What the allocator's library is made of."""
    flags = ("-std=c++20", "-O2", "-fPIC", "-shared", "-pthread")
    return Library("counting", "the counting allocator", Path(__file__).with_name("allocator.cpp"), flags, uses_torch=True)


def build(*, force: bool = False) -> Built:
    """Compile the allocator's library unless it is there.

    Args:
        force: compile even if it is there.

    Raises:
        BuildError: no compiler, the compiler refused the source, or the result cannot be loaded.
    """
    return library().build(force=force)


class CountingAllocator:
    """Torch's CPU allocator, counting. One for the process: see ``install``.

    Blocks of 64 KiB or more begin on a page (4096 bytes) and end on one, so that direct file access (O_DIRECT) may go straight
    to and from a tensor's storage. They go back to the system when they are freed, unless they are cached: a fresh block costs
    a page fault for each of its pages, so times with and without the cache are not comparable. All methods may be called from
    any thread. A forked process goes on counting from its parent's figures.
    """

    _installed: CountingAllocator | None = None

    def __init__(self, path: Path) -> None:
        """For ``install``."""
        brief, long = ctypes.PyDLL(str(path)), ctypes.CDLL(str(path))
        self._functions: dict[str, Callable[..., int]] = {}
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(long if name in _WITHOUT_GIL else brief, f"laneway_counting_{name}")
            function.restype, function.argtypes = result, arguments
            self._functions[name] = function
        self.caching = False
        """Whether freed big blocks are kept for the next of their size."""

    @classmethod
    def install(cls, *, caching: bool = False) -> CountingAllocator:
        """Make every later CPU tensor of this process counted. Compiles the library the first time.

        Tensors that are there already stay with the allocator that made them. There is no way back: whoever wants another
        setting, or none, starts another process. A second call returns the first one's allocator.

        Args:
            caching: keep freed big blocks for the next of their size class (eight classes to a factor of two).

        Raises:
            BuildError: no C++ compiler, or the library cannot be built or loaded.
            InputError: it is installed with the other ``caching``.
            LanewayError: torch keeps another allocator.
        """
        there = cls._installed
        if there is not None:
            if there.caching != caching:
                raise InputError("caching", caching, f"{there.caching}, as the counting allocator was installed with")
            return there
        import torch  # noqa: F401 (the library needs its libc10 loaded)

        new = cls(build().path)
        if not new._functions["install"](int(caching)):
            raise LanewayError("the counting allocator could not be installed: torch has one of a higher priority")
        new.caching = caching
        cls._installed = new
        return new

    @classmethod
    def installed(cls) -> CountingAllocator | None:
        """The process's counting allocator, None before ``install``."""
        return cls._installed

    @property
    def live(self) -> int:
        """Bytes that living tensors asked for."""
        return self._functions["live"]()

    @property
    def peak(self) -> int:
        """The most that ``live`` was since ``reset_peak``, else since the start."""
        return self._functions["peak"]()

    @property
    def allocations(self) -> int:
        """How many blocks were ever handed out; blocks of no bytes are none."""
        return self._functions["allocations"]()

    @property
    def cached(self) -> int:
        """Bytes of freed blocks that are kept for the next of their size; no part of ``live``."""
        return self._functions["cached"]()

    @property
    def refused(self) -> int:
        """How many allocations raised ``torch.OutOfMemoryError``."""
        return self._functions["refused"]()

    def reset_peak(self) -> None:
        """Let the peak begin again at what is live now."""
        self._functions["reset_peak"]()

    def limit(self, nbytes: int | None) -> None:
        """Raise ``torch.OutOfMemoryError`` for an allocation that would make ``live`` more than ``nbytes``.

        Args:
            nbytes: None for no limit. It may be below ``live``: then nothing more is allocated until enough is freed.
        """
        self._functions["set_limit"](_UNLIMITED if nbytes is None else min(positive_int("nbytes", nbytes), _UNLIMITED))

    @property
    def limited_to(self) -> int | None:
        """The limit in bytes, None where there is none."""
        nbytes = self._functions["limit"]()
        return None if nbytes == _UNLIMITED else nbytes

    def empty_cache(self) -> None:
        """Return the cached blocks to the system."""
        self._functions["empty_cache"]()

    def fail_at(self, allocation: int, min_bytes: int = 0) -> None:
        """Let one allocation to come raise ``torch.OutOfMemoryError``, once, whatever the limit.

        Args:
            allocation: which of the next ones, from 1; 0 takes the request back. A new request replaces the last.
            min_bytes: count only allocations of at least so many bytes.
        """
        counts = positive_int("allocation", allocation, at_least=0), positive_int("min_bytes", min_bytes, at_least=0)
        self._functions["fail_at"](*(min(count, _UNLIMITED) for count in counts))

    @property
    def fails_in(self) -> int:
        """How many more allocations until the requested failure; 0 once it was raised."""
        return self._functions["fails_in"]()

    def mapped(self, address: int) -> int:
        """How many bytes from ``address`` on belong to the big block that begins there, up to the end of its last page.

        0 where no big block of this allocator begins: of a small one, of a tensor that is older than the allocator or came
        from elsewhere, nothing beyond the tensor's own bytes may be read or written.
        """
        return self._functions["mapped"](address)

    def record(self, events: int | None = 1 << 20) -> None:
        """Log allocations and releases from now on; an earlier log is dropped.

        Args:
            events: how many to keep, 16 bytes each: the newest. None ends the log.
        """
        size = 0 if events is None else positive_int("events", events)
        if size > 1 << 32 or not self._functions["record"](size):
            raise InputError("events", events, "as many as there is memory for, 16 bytes each")

    def events(self) -> list[Event]:
        """The log, oldest first: at most the newest that there was room for."""
        room = self._functions["kept"]()
        seconds, nbytes = (c_double * room)(), (c_int64 * room)()
        kept = self._functions["events"](seconds, nbytes, room)
        return [Event(seconds[i], nbytes[i]) for i in range(kept)]

    @property
    def recorded(self) -> int:
        """How many events happened since ``record``, those that the log had no more room for included."""
        return self._functions["logged"]()
