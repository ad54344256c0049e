"""The device's meter, without what the benchmark itself holds on it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from laneway.memory.meter import device_meter


class Without:
    """The CPU's meter less ``own()`` bytes."""

    def __init__(self, own: Callable[[], int]) -> None:
        self.meter, self.own = device_meter(torch.device("cpu")), own

    def live(self) -> int:
        """Bytes in use."""
        return self.meter.live() - self.own()

    def peak(self) -> int:
        """Most bytes in use since the last reset."""
        return self.meter.peak() - self.own()

    def reset_peak(self) -> None:
        """Start anew."""
        self.meter.reset_peak()

    def capacity(self) -> int:
        """Bytes that there are."""
        return self.meter.capacity()
