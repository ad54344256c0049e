"""Copies between tensor storages and host memory that hold no lock of the interpreter and touch no byte beside the storage's."""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

PAGE = mmap.PAGESIZE


def memory_at(address: int, nbytes: int) -> memoryview:
    """``nbytes`` of this process's memory, to read and write. The caller keeps what lies there alive."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def move(target: int, source: int, nbytes: int) -> None:
    """Copy ``nbytes`` of this process's memory from one address to another."""
    ctypes.memmove(target, source, nbytes)


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """The storage as a tensor of bytes, [nbytes] uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class Staging:
    """A page-aligned buffer of ``nbytes``, pinned for ``device`` where it is an accelerator that takes that.

    Attributes:
        address, view, tensor: the same memory three ways.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        tensor = pinned(nbytes) if device.type != "cpu" else None
        if tensor is None or tensor.data_ptr() % PAGE:
            tensor = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
        self.tensor, self.nbytes = tensor, nbytes
        self.address = tensor.data_ptr()
        self.view = memory_at(self.address, nbytes)


def pinned(nbytes: int) -> Tensor | None:
    """``nbytes`` of page-locked host memory as [nbytes] uint8; None where the system refuses."""
    try:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:
        return None


def mark(storage: torch.UntypedStorage) -> torch.Event | None:
    """What a copy of ``storage`` has to wait for: the work queued so far on the caller's stream. None on the CPU."""
    if storage.device.type == "cpu":
        return None
    event = torch.Event(storage.device)
    event.record(torch.accelerator.current_stream(storage.device))
    return event


class DeviceCopier:
    """Copies to or from an accelerator on a stream of its own; for use by one thread.

    The thread blocks until a copy is complete, so whoever holds the tensors until then needs no further care of streams.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.Stream] = {}

    def __call__(self, target: Tensor, source: Tensor, after: torch.Event | None) -> None:
        """Copy, beginning when ``after`` is reached."""
        device = target.device if target.device.type != "cpu" else source.device
        if device not in self._streams:
            self._streams[device] = torch.Stream(device)
        stream = self._streams[device]
        with stream:
            if after is not None:
                stream.wait_event(after)
            target.copy_(source, non_blocking=True)
            stream.record_event().synchronize()
