"""Memory in tiers: what is kept on the device, what moves to the host or a disk, and what is made again.

The public names below are imported on first use, so that the configuration can be read without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
    "manage_memory": "laneway.memory.manage",
    "MemoryManager": "laneway.memory.manager",
    "PassReport": "laneway.memory.manager",
    "MemoryConfig": "laneway.memory.config",
    "SurvivalEvent": "laneway.memory.survive",
    "Survivor": "laneway.memory.survive",
    "StreamedOptimizerState": "laneway.memory.optimizer_state",
    "StreamedParameters": "laneway.memory.parameters",
    "ParkedGradients": "laneway.memory.gradients",
    "DynamicAllocator": "laneway.memory.pool",
    "Hint": "laneway.memory.pool",
    "MemoryPool": "laneway.memory.pool",
    "Tier": "laneway.memory.tier",
    "TierFullError": "laneway.memory.tier",
    "HostTier": "laneway.memory.host",
    "DiskTier": "laneway.memory.disk",
    "SimulatedTier": "laneway.memory.simulated",
    "StackedTier": "laneway.memory.stack",
    "Throttle": "laneway.memory.throttle",
    "InFlight": "laneway.memory.collectives",
    "Agreement": "laneway.memory.reduce",
    "reduce_gradients": "laneway.memory.reduce",
    "step_exactly": "laneway.memory.exact_step",
    "LookAhead": "laneway.memory.lookahead",
    "Signature": "laneway.memory.signature",
    "Forecaster": "laneway.memory.predict",
    "Meter": "laneway.memory.meter",
    "device_meter": "laneway.memory.meter",
    "CountingAllocator": "laneway.memory.counting",
    "PassProfile": "laneway.memory.profile",
    "Plan": "laneway.memory.plan",
    "make_plan": "laneway.memory.plan",
    "Link": "laneway.memory.simulate",
    "VirtualClock": "laneway.memory.clock",
}

__all__ = [
    "Agreement",
    "CountingAllocator",
    "DiskTier",
    "DynamicAllocator",
    "Forecaster",
    "Hint",
    "HostTier",
    "InFlight",
    "Link",
    "LookAhead",
    "MemoryConfig",
    "MemoryManager",
    "MemoryPool",
    "Meter",
    "ParkedGradients",
    "PassProfile",
    "PassReport",
    "Plan",
    "Signature",
    "SimulatedTier",
    "StackedTier",
    "StreamedOptimizerState",
    "StreamedParameters",
    "SurvivalEvent",
    "Survivor",
    "Throttle",
    "Tier",
    "TierFullError",
    "VirtualClock",
    "device_meter",
    "make_plan",
    "manage_memory",
    "reduce_gradients",
    "step_exactly",
]

if TYPE_CHECKING:
    from laneway.memory.clock import VirtualClock
    from laneway.memory.collectives import InFlight
    from laneway.memory.config import MemoryConfig
    from laneway.memory.counting import CountingAllocator
    from laneway.memory.disk import DiskTier
    from laneway.memory.exact_step import step_exactly
    from laneway.memory.gradients import ParkedGradients
    from laneway.memory.host import HostTier
    from laneway.memory.lookahead import LookAhead
    from laneway.memory.manage import manage_memory
    from laneway.memory.manager import MemoryManager, PassReport
    from laneway.memory.meter import Meter, device_meter
    from laneway.memory.optimizer_state import StreamedOptimizerState
    from laneway.memory.parameters import StreamedParameters
    from laneway.memory.plan import Plan, make_plan
    from laneway.memory.pool import DynamicAllocator, Hint, MemoryPool
    from laneway.memory.predict import Forecaster
    from laneway.memory.profile import PassProfile
    from laneway.memory.reduce import Agreement, reduce_gradients
    from laneway.memory.signature import Signature
    from laneway.memory.simulate import Link
    from laneway.memory.simulated import SimulatedTier
    from laneway.memory.stack import StackedTier
    from laneway.memory.survive import SurvivalEvent, Survivor
    from laneway.memory.throttle import Throttle
    from laneway.memory.tier import Tier, TierFullError


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module 'laneway.memory' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
