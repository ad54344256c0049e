"""What autograd saves of parameters that may be away when the backward pass comes to it.

Views of a parameter (``weight.t()``) are saved as the storage, which keeps its identity, and how to look at it. Everything else
that is saved goes where it would have gone: to the hooks that were in force outside, or, without any, to the graph, with the
check for changes in place that torch leaves out where hooks are in force.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.autograd.graph import saved_tensors_hooks

from laneway.memory.extents import key_of
from laneway.memory.parcel import Parcel


class SavedParameters:
    """Hooks on saved tensors that know the storages of parameters.

    Args:
        parcels: by the address of their storage.
        wanted: called when a parcel's bytes are about to be used in a backward pass; afterwards they must be here.
        let_go: called when autograd holds no saved use of a parcel any more, from wherever it let go: must not touch tensors.

    Attributes:
        uses: saved uses by parcel.
    """

    def __init__(self, parcels: Mapping[int, Parcel], wanted: Callable[[Parcel], None], let_go: Callable[[Parcel], None]) -> None:
        self.parcels, self.wanted, self.let_go = parcels, wanted, let_go
        self.uses: Counter[Parcel] = Counter()

    def push(self) -> saved_tensors_hooks | None:
        """Put the hooks in force, on top of those that are; None where they are on top already."""
        outside = _top_saved_tensors_default_hooks(True)
        above = getattr(outside[0], "__self__", None) if outside is not None else None
        if isinstance(above, _Hooks) and above.saved is self:
            return None
        pair = _Hooks(self, outside)
        hooks = saved_tensors_hooks(pair.pack, pair.unpack)
        hooks.__enter__()
        return hooks

    def dropped(self, parcel: Parcel) -> None:
        """A saved use is gone."""
        self.uses[parcel] -= 1
        if self.uses[parcel] == 0:
            self.let_go(parcel)


class _Use:
    """A saved view of a parcel's storage."""

    def __init__(self, saved: SavedParameters, parcel: Parcel, tensor: Tensor) -> None:
        self.saved, self.parcel = saved, parcel
        self.view = tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.is_conj(), tensor.is_neg()
        self.watch = _Watched(tensor)
        saved.uses[parcel] += 1

    def __del__(self) -> None:
        self.saved.dropped(self.parcel)

    def restore(self) -> Tensor:
        self.saved.wanted(self.parcel)
        self.watch.check()
        size, stride, offset, dtype, conj, neg = self.view
        tensor = torch.empty(0, dtype=dtype, device=self.parcel.storage.device).set_(self.parcel.storage, offset, size, stride)
        tensor = tensor.conj() if conj else tensor
        return torch._neg_view(tensor) if neg else tensor


class _Watched:
    """A saved tensor, and the version that it had: torch checks that only where no hooks are in force."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()
        self.version = tensor._version

    def check(self) -> None:
        found = self.tensor._version
        if found != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self.tensor.dtype} {list(self.tensor.shape)}] is at version {found}; expected version {self.version} instead."
            )


class _Hooks:
    def __init__(self, saved: SavedParameters, outside: tuple[Callable[..., Any], Callable[..., Any]] | None) -> None:
        self.saved, self.outside = saved, outside

    def pack(self, tensor: Tensor) -> Any:
        if tensor.layout is torch.strided and not hasattr(type(tensor), "__tensor_flatten__"):
            parcel = self.saved.parcels.get(key_of(tensor))
            if parcel is not None:
                return _Use(self.saved, parcel, tensor)
        return _Watched(tensor) if self.outside is None else (self.outside[0](tensor),)

    def unpack(self, kept: Any) -> Tensor:
        if isinstance(kept, _Use):
            return kept.restore()
        if isinstance(kept, _Watched):
            kept.check()
            return kept.tensor
        assert self.outside is not None
        return self.outside[1](*kept)
