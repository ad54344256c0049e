"""Time of one matrix product: the roofline with tiles and waves."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from laneway.cluster.costs.calibration import Calibration
from laneway.cluster.costs.constants import TILES, multiprocessors, reached
from laneway.cluster.topology import Device
from laneway.core import InputError

__all__ = ["Machine", "efficiency", "matmul_seconds", "peak_flops"]


@dataclass(frozen=True)
class Machine:
    """What a device does in a second, as reached: FLOP/s of products and bytes, and its multiprocessors.

    `wide_flops` counts where fp8 training stays in bf16: attention's inner products and the read-out.
    """

    flops: float
    wide_flops: float
    bandwidth: float
    multiprocessors: int
    element_bytes: int
    k_half: float
    kernel_s: float
    elementwise_factor: float

    @classmethod
    def of(cls, device: Device, precision: str, calibration: Calibration) -> Machine:
        """A device under a calibration. A precision the device lacks falls back to its next wider one."""
        share = calibration.matmul_fraction * reached(device.name)
        wide = "bf16" if precision == "fp8" else precision
        return cls(
            share * peak_flops(device, precision),
            share * peak_flops(device, wide),
            device.memory_bandwidth * calibration.memory_fraction,
            multiprocessors(device.name),
            4 if precision == "fp32" else 2,
            calibration.k_half,
            calibration.kernel_s,
            calibration.elementwise_factor,
        )


FALLBACK = {"fp8": ("fp8", "bf16", "tf32", "fp32"), "bf16": ("bf16", "tf32", "fp32"), "fp32": ("tf32", "fp32")}


def peak_flops(device: Device, precision: str) -> float:
    """Nominal FLOP/s; of the next wider precision where the device lacks one.

    Raises:
        InputError: the device has none of them.
    """
    found = next((device.flops[name] for name in FALLBACK[precision] if name in device.flops), 0.0)
    if not found > 0:
        raise InputError("device.flops", device.flops, f"FLOP/s above 0 for one of {', '.join(FALLBACK[precision])}")
    return found


@lru_cache(maxsize=65536)
def efficiency(m: int, n: int, k: int, batch: int, multiprocessors: int, k_half: float) -> float:
    """Share of the reachable FLOP/s that the shape allows: edges of tiles, the last wave, and short inner dimensions.

    The best of `TILES` is taken. A tile's start and end cost as much as `k_half` of inner dimension.
    """
    best = 0.0
    for rows, columns, rate in TILES:
        tiles_m, tiles_n = ceil(m / rows), ceil(n / columns)
        tiles = tiles_m * tiles_n * batch
        waves = ceil(tiles / multiprocessors) * multiprocessors / tiles
        filled = (m * n) / (tiles_m * rows * tiles_n * columns)
        best = max(best, rate * filled / waves)
    return best * k / (k + k_half)


def matmul_seconds(m: int, n: int, k: int, machine: Machine, *, batch: int = 1, wide: bool = False) -> float:
    """Seconds of `batch` products [m, k] × [k, n]: the slower of arithmetic and memory, and the kernel's start."""
    rate = machine.wide_flops if wide else machine.flops
    flops = 2.0 * m * n * k * batch
    nbytes = machine.element_bytes * batch * (m * k + k * n + m * n)
    reach = efficiency(m, n, k, batch, machine.multiprocessors, machine.k_half)
    return max(flops / (rate * reach), nbytes / machine.bandwidth) + machine.kernel_s
