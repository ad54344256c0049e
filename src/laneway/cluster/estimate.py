"""What the cost model says of one layout."""

from __future__ import annotations

from dataclasses import dataclass, field

from laneway.cluster.figure import Interval

__all__ = ["Estimate", "MemoryEstimate"]


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on the fullest device."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float = 0.0

    @property
    def total(self) -> float:
        """All of them."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers


@dataclass(frozen=True)
class Estimate:
    """One training step.

    Attributes:
        seconds: step time with its interval.
        breakdown: seconds by part; parts add up to `seconds.value`: "compute", "recompute", "tensor", "context", "expert",
            "pipeline", "bubble", "data" (exposed), "optimizer", and "offload" where a plan keeps states on the host.
        hidden: seconds of communication that ran beside compute, by the same names.
        bytes_per_level: bytes that leave one device over each level in a step, by level name.
        memory: bytes on the fullest device.
        mfu: model FLOP/s over peak FLOP/s.
        kwh_per_token: energy at the devices' full power, and of the bytes on each level (`Level.joules_per_byte`).
    """

    seconds: Interval
    breakdown: dict[str, float]
    memory: MemoryEstimate
    mfu: float
    kwh_per_token: float
    hidden: dict[str, float] = field(default_factory=dict)
    bytes_per_level: dict[str, float] = field(default_factory=dict)

    @property
    def exposed_communication(self) -> float:
        """Seconds in which devices wait for the network."""
        return sum(self.breakdown.get(part, 0.0) for part in ("tensor", "context", "expert", "pipeline", "data"))
