"""A leaf module's forward pass, to be run again on what it was given and with the attributes that it had."""

from __future__ import annotations

import copy
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from laneway.memory.entries import Entry
from laneway.memory.extents import View, version_of


def check_version(tensor: Tensor, version: int | None) -> None:
    """Raise what torch raises where a saved tensor was written in place.

    Raises:
        RuntimeError: it was.
    """
    if version is not None and tensor._version != version:
        raise RuntimeError(
            f"{CHANGED}[{tensor.dtype} {list(tensor.shape)}] is at version {tensor._version}; expected version {version} instead"
        )


CHANGED = "one of the variables needed for gradient computation has been modified by an inplace operation: "


class Kept:
    """Stands for a saved tensor that is none of the manager's business."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version = tensor.detach(), version_of(tensor)

    def unpack(self) -> Tensor:
        """The tensor.

        Raises:
            RuntimeError: it was written in place since.
        """
        check_version(self.tensor, self.version)
        return self.tensor


class Loan:
    """A view of an entry that a recipe reads; the books keep the entry for it."""

    __slots__ = ("entry", "view")

    def __init__(self, entry: Entry, view: View) -> None:
        self.entry, self.view = entry, view

    def unpack(self) -> Tensor:
        """The view of the entry's storage, which is resident.

        Raises:
            RuntimeError: it was written in place since.
        """
        self.entry.body.check()
        return self.view.over(self.entry.body.storage)


class Recipe:
    """A leaf module's forward pass, to be run again on what it was given.

    Attributes:
        module: its ``forward`` is called, without hooks, with the attributes, parameters and buffers that it had.
        inputs: what it was given; loans and kept tensors in place of tensors.
        seconds: what it takes, where known.
    """

    def __init__(self, name: str, module: nn.Module, inputs: tuple[Any, ...], device: torch.device) -> None:
        self.name, self.module, self.inputs, self.device = name, module, inputs, device
        self.autocast = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
        self.attributes = {name: _held(value) for name, value in module.__dict__.items()}
        own = [*module._parameters.values(), *module._buffers.values()]
        self.versions = [(tensor, version_of(tensor)) for tensor in own if tensor is not None]
        self.seconds: float | None = None

    def entries(self) -> tuple[Entry, ...]:
        """The entries that hold its inputs."""
        return tuple(held.entry for held in self.inputs if isinstance(held, Loan))

    def run(self) -> Tensor:
        """The module's output, without a graph; the entries it reads are resident.

        Raises:
            RuntimeError: an input, a parameter or a buffer was written in place since.
        """
        for tensor, version in self.versions:
            check_version(tensor, version)
        inputs = [held.unpack() if isinstance(held, Loan | Kept) else held for held in self.inputs]
        enabled, dtype = self.autocast
        with torch.no_grad(), torch.autocast(self.device.type, dtype=dtype, enabled=enabled), self._as_it_was():
            found: Tensor = self.module.forward(*inputs)
        return found

    @contextmanager
    def _as_it_was(self) -> Generator[None]:
        now = dict(self.module.__dict__)
        self.module.__dict__.update(self.attributes)
        try:
            yield
        finally:
            self.module.__dict__.clear()
            self.module.__dict__.update(now)


def _held(value: Any) -> Any:
    return copy.copy(value) if type(value) in (list, dict, set) else value
