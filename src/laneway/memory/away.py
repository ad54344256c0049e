"""Tensors whose bytes are in a tier: whatever reads or writes one raises, instead of reading memory that isn't there.

The storage keeps its identity and has zero bytes meanwhile, so views of it that autograd saved are right again when the bytes are
back. A tensor that is away has a class of its own, derived from the one it had, that lets only questions about its shape through.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from laneway.core import LanewayError

_ATTRIBUTES = (
    "shape", "dtype", "device", "layout", "requires_grad", "grad", "is_leaf", "grad_fn", "_version", "ndim", "itemsize", "nbytes",
    "is_cpu", "is_cuda", "is_sparse", "is_quantized", "is_meta", "is_mkldnn", "retains_grad", "_backward_hooks", "is_nested",
    "_post_accumulate_grad_hooks", "output_nr", "is_xpu", "is_mps",
)  # fmt: skip
_METHODS = (
    "size", "stride", "dim", "numel", "nelement", "element_size", "is_floating_point", "is_complex", "is_contiguous", "__len__",
    "storage_offset", "untyped_storage", "register_hook", "register_post_accumulate_grad_hook", "get_device", "is_signed",
    "is_inference",
)  # fmt: skip


def _questions() -> set[Callable[..., Any]]:
    allowed: set[Callable[..., Any]] = {getattr(Tensor, name) for name in _METHODS}
    for name in _ATTRIBUTES:
        if hasattr(Tensor, name):  # some exist in some versions of torch only
            allowed.add(getattr(Tensor, name).__get__)
    for name in ("requires_grad", "grad", "_backward_hooks", "_post_accumulate_grad_hooks"):
        allowed.add(getattr(Tensor, name).__set__)
    return allowed


_QUESTIONS = _questions()


class _Away:
    """Mixed into the class of a tensor that is away."""

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        if func in _QUESTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise LanewayError(f"{getattr(func, '__name__', func)}: a tensor was used whose bytes are in a tier; bring it back first")

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self, *_: Any, **__: Any) -> str:
        assert isinstance(self, Tensor)
        return f"<{tuple(self.shape)} {self.dtype}, in a tier>"


@cache
def _away_class(cls: type) -> type:
    return type(f"Away{cls.__name__}", (_Away, cls), {"__hash__": _Away.__hash__, "here": cls})


def mark_away(tensor: Tensor) -> None:
    """From now on only questions about its shape are answered."""
    if not is_away(tensor):
        tensor.__class__ = _away_class(type(tensor))


def mark_here(tensor: Tensor) -> None:
    """Undo of ``mark_away``."""
    if is_away(tensor):
        tensor.__class__ = type(tensor).here  # type: ignore[attr-defined]


def is_away(tensor: object) -> bool:
    """Whether its bytes are, or are about to be, in a tier."""
    return isinstance(tensor, _Away)
