"""laneway: wide residual streams that stay stable, for PyTorch.

The public names below are imported on first use, so that ``import laneway`` itself never loads torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "ConsistencyCheck": "laneway.connections",
    "add_lora": "laneway.connections",
    "HyperConnection": "laneway.connections",
    "StreamReadout": "laneway.connections",
    "StreamChain": "laneway.connections",
    "use_backend": "laneway.connections",
    "expand_streams": "laneway.connections",
    "param_groups": "laneway.connections",
    "shard_connections": "laneway.connections",
    "StreamProbe": "laneway.connections",
    "accelerate_hf": "laneway.connections.hf",
    "restore_hf": "laneway.connections.hf",
    "convert": "laneway.connections.convert",
    "unconvert": "laneway.connections.convert",
    "load_converted": "laneway.connections.load",
    "manage_memory": "laneway.memory.manage",
    "InputError": "laneway.core",
    "LanewayError": "laneway.core",
    "auto_config": "laneway.strategy.auto",
}

__all__ = [
    "ConsistencyCheck",
    "HyperConnection",
    "InputError",
    "LanewayError",
    "StreamChain",
    "StreamProbe",
    "StreamReadout",
    "__version__",
    "accelerate_hf",
    "add_lora",
    "auto_config",
    "convert",
    "expand_streams",
    "load_converted",
    "manage_memory",
    "param_groups",
    "restore_hf",
    "shard_connections",
    "unconvert",
    "use_backend",
]

if TYPE_CHECKING:
    from laneway.connections import (
        ConsistencyCheck,
        HyperConnection,
        StreamChain,
        StreamProbe,
        StreamReadout,
        add_lora,
        expand_streams,
        param_groups,
        shard_connections,
        use_backend,
    )
    from laneway.connections.convert import convert, unconvert
    from laneway.connections.hf import accelerate_hf, restore_hf
    from laneway.connections.load import load_converted
    from laneway.core import InputError, LanewayError
    from laneway.memory.manage import manage_memory
    from laneway.strategy.auto import auto_config


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module 'laneway' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
