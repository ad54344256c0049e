"""Which bytes a tensor stands for: its storage at one version, never an address, for addresses are used again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

T = TypeVar("T")

Key = int
"""A storage's identity (its StorageImpl). Unique for as long as a weak reference to it is held."""


def key_of(tensor: Tensor) -> Key:
    """The identity of the storage behind ``tensor``."""
    return tensor.untyped_storage()._cdata


def version_of(tensor: Tensor) -> int | None:
    """How often the bytes were written in place; None where torch keeps no count (tensors made in inference mode)."""
    return None if tensor.is_inference() else tensor._version


@dataclass(frozen=True)
class View:
    """How a tensor lies in its storage: enough to make it again over another one of the same size."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    conjugate: bool
    negative: bool

    @classmethod
    def of(cls, tensor: Tensor) -> View:
        """The view that ``tensor`` is."""
        return cls(
            tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()), tensor.is_conj(), tensor.is_neg()
        )  # fmt: skip

    def over(self, storage: torch.UntypedStorage) -> Tensor:
        """The same view of ``storage``, without a graph."""
        found = torch.empty(0, dtype=self.dtype, device=storage.device).set_(storage, self.offset, self.size, self.stride)
        if self.conjugate:
            found = found.conj()
        return torch._neg_view(found) if self.negative else found


def plain(tensor: Tensor) -> bool:
    """Whether ``tensor`` is strided memory and nothing more: no subclass, sparse, quantized, meta or functional tensor."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and tensor.device.type != "meta"
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


class Known(Generic[T]):
    """What is known of storages that are alive, by identity; an entry of a storage that is gone is never found."""

    def __init__(self) -> None:
        self._found: dict[Key, tuple[StorageWeakRef, T]] = {}

    def get(self, tensor: Tensor) -> T | None:
        """What is known of the storage behind ``tensor``."""
        found = self._found.get(key_of(tensor))
        return None if found is None else found[1]  # the weak reference keeps the identity from being given to another storage

    def put(self, tensor: Tensor, value: T) -> None:
        """Remember ``value`` for the storage behind ``tensor``."""
        storage = tensor.untyped_storage()
        self._found[storage._cdata] = (StorageWeakRef(storage), value)

    def drop(self, key: Key, value: T) -> None:
        """Forget the storage of this identity, if ``value`` is what is known of it."""
        if key in self._found and self._found[key][1] is value:
            del self._found[key]

    def clear(self) -> None:
        """Forget everything."""
        self._found.clear()


def storages(tensors: Iterable[Tensor]) -> Known[bool]:
    """The storages behind ``tensors``; of a DTensor or another wrapper, those of its local parts."""
    found: Known[bool] = Known()
    for tensor in tensors:
        for part in _parts(tensor):
            found.put(part, True)
    return found


def _parts(tensor: Tensor) -> Iterable[Tensor]:
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            part = getattr(tensor, name)
            if isinstance(part, Tensor):
                yield from _parts(part)
    elif tensor.layout is torch.strided and tensor.device.type != "meta":
        yield tensor
