"""Gradients of DistributedDataParallel and FSDP2 reduced over the levels of a network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from laneway.cluster.hooks.ddp import DDPReduction, attach_ddp
    from laneway.cluster.hooks.fsdp import attach_fsdp

__all__ = ["DDPReduction", "attach_ddp", "attach_fsdp"]

_HOME = {"DDPReduction": "ddp", "attach_ddp": "ddp", "attach_fsdp": "fsdp"}


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
