"""Constants of devices and of NCCL that the formulas use, each with its source. What is fitted is in ``calibration``."""

from __future__ import annotations

from laneway.cluster.figure import Figure

__all__ = [
    "BASE_LATENCY",
    "CONTEXT",
    "MULTICAST",
    "MULTIPROCESSORS",
    "NVLS_LATENCY",
    "NVLS_SHARE",
    "POST",
    "REACHED",
    "TILES",
    "multiprocessors",
    "reached",
]

BASE_LATENCY = Figure(8.4e-6, "s", "NCCL tuning.cc, baseLatencies, Simple protocol")
"""Launch of one collective, before its first step."""
POST = Figure(1.0e-6, "s", "NCCL tuning.cc, getNetOverhead (1 µs on Intel hosts)")
"""One more message of an all-to-all."""
NVLS_LATENCY = Figure(25e-6, "s", "NCCL tuning.cc, NVLSTree base latency")
NVLS_SHARE = Figure(0.74, "1", "NCCL 2.27.5 tuner output for 8 × H100: all-reduce 267 GB/s at a ring bandwidth of 360 GB/s")
"""All-reduce rate (bytes reduced a second) of one node's multicast switch over a device's link bandwidth."""
NVLS_TREE_SHARE = Figure(0.82, "1", "NCCL 2.27.5 tuner output: 160 GB/s at 4 … 32 H100 nodes of 8 × 48.5 GB/s")
"""Share of the node's links that an NVLS tree fills."""
CONTEXT = Figure(
    1.5e9, "B", "CUDA context, cuBLAS workspace and NCCL buffers of one process; order of magnitude, NVIDIA A100/H100"
)

MULTIPROCESSORS: dict[str, int] = {"A100": 108, "H100": 132, "H200": 132, "B200": 148, "MI300X": 304, "V100": 80}
"""Blocks that run at once, one a multiprocessor: vendors' data sheets."""
REACHED: dict[str, float] = {"A100": 0.869, "H100": 0.803, "H200": 0.803, "B200": 0.776, "MI300X": 0.60}
"""Share of the peak that the best bf16 matrix product reaches: Bekman, "Machine Learning Engineering", table of maximum
achievable matmul FLOPS (271.2 of 312, 794.5 of 989, the H100's for the H200, 1745 of 2250, 782 of 1300 TFLOP/s)."""
MULTICAST = ("H100", "H200", "B200")
"""Devices whose switch reduces and multicasts (NVLink SHARP, third-generation NVSwitch)."""

TILES: tuple[tuple[int, int, float], ...] = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.94), (128, 64, 0.8), (64, 64, 0.6))
"""Output tiles of a matrix product (rows, columns) and their rate over the largest one's. NVIDIA, "Matrix Multiplication
Background User's Guide" (figures of tile efficiency on an A100, read off)."""


def multiprocessors(device: str) -> int:
    """Multiprocessors of a device; 1 for one that the table lacks: no wave quantisation is then assumed."""
    return next((count for name, count in MULTIPROCESSORS.items() if device.upper().startswith(name)), 1)


def reached(device: str) -> float:
    """What the device's best product reaches of its peak over what the A100's does; 1 for a device that the table lacks."""
    return next((share for name, share in REACHED.items() if device.upper().startswith(name)), REACHED["A100"]) / REACHED["A100"]
