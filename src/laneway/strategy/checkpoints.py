"""How often to write a checkpoint: Young's formula over the published rate of failures."""

from __future__ import annotations

import math
from dataclasses import dataclass

from laneway.cluster.figure import Figure
from laneway.cluster.topology import Device
from laneway.strategy.offload import host_link

# 419 unexpected interruptions in 54 days of 16,384 devices.
DEVICE_HOURS = Figure(54 * 24 * 16_384 / 419, "device hours per interruption", "Llama 3, arXiv 2407.21783, section 3.3.4")
LOCAL_COPY = Figure(2e9, "bytes/s", "assumption: one device's share of a node's disks, where there is no host copy")


@dataclass(frozen=True)
class CheckpointPolicy:
    """When and how a checkpoint is written.

    Attributes:
        kind: "sharded-async": each rank copies its shard to the host and goes on while it is written.
        blocking_s: seconds the step waits for the copy.
        interval_s, interval_steps: between checkpoints.
        mtbf_s: mean time between interruptions of the whole job.
    """

    kind: str
    bytes_per_device: float
    blocking_s: float
    interval_s: float
    interval_steps: int
    mtbf_s: float


def checkpoint_policy(device: Device, world: int, state_bytes: float, step_s: float) -> CheckpointPolicy:
    """Young's interval √(2·δ·M) (CACM 17(9), 1974): δ the time a checkpoint costs, M the mean time between interruptions."""
    mtbf = DEVICE_HOURS.value * 3600 / world
    link = host_link(device) or LOCAL_COPY
    blocking = state_bytes / link.value
    interval = min(mtbf, max(step_s, math.sqrt(2 * blocking * mtbf)))
    return CheckpointPolicy("sharded-async", state_bytes, blocking, interval, max(1, round(interval / step_s)), mtbf)
