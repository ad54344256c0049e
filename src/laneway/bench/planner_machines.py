"""Machines of published measurements, as the cost model sees them: each number with its source."""

from __future__ import annotations

from math import ceil

from laneway.cluster.costs import Calibration
from laneway.cluster.topology import Device, Level, Topology

NCCL_INSIDE = "NCCL tuning.cc, hwLatencies: NVLink ring, Simple"
NCCL_BETWEEN = "NCCL tuning.cc, hwLatencies: network ring, Simple"
A100 = Device(
    "A100", {"fp32": 19.5e12, "tf32": 156e12, "bf16": 312e12}, 80e9, 2.039e12, 400.0, "NVIDIA A100 80 GB SXM data sheet"
)
H100 = Device(
    "H100",
    {"fp32": 66.9e12, "tf32": 494.7e12, "bf16": 989.4e12, "fp8": 1978.9e12},
    80e9,
    3.35e12,
    700.0,
    "NVIDIA H100 SXM5 white paper, dense",
)
H100_HBM2E = Device(
    "H100", H100.flops, 96e9, 2.4e12, 500.0, "torchtitan's H100 benchmark page: 96 GB HBM2e at 2.4 TB/s, 500 W; peak of the SXM5"
)
MEGATRON_ERA = Calibration(flash_attention=False)
"""Megatron in 2021 to 2023: attention in several kernels, scores kept."""


def nvlink(device: Device) -> Level:
    """Eight devices of a node."""
    if device.name == "A100":
        return Level("L1", 8, 3.4e-6, 229e9, network="NVLink3", source=f"vTrain's all-reduce table, 1 GB on 8; {NCCL_INSIDE}")
    return Level("L1", 8, 3.4e-6, 365e9, network="NVLink4", source=f"nccl#1455: 360 to 370 GB/s; {NCCL_INSIDE}")


def fabric(nodes: int, adapters: int, gigabits: float, name: str, source: str) -> Level:
    """Nodes with some adapters each, of which collectives reach 97 in 100 parts (SimAI: 48.5 of 50 GB/s)."""
    return Level("L2", nodes, 14e-6, gigabits / 8 * 0.97e9, links=adapters, network=name, source=f"{source}; {NCCL_BETWEEN}")


def vtrain(devices: int) -> Topology:
    """vTrain's cluster: eight A100 and four HDR adapters a node."""
    return _of(A100, devices, 4, 200, "HDR200", "vTrain, MICRO 2024: four HDR InfiniBand adapters of 200 Gb/s a node")


def selene(devices: int) -> Topology:
    """NVIDIA's Selene: eight A100 and eight HDR adapters a node."""
    return _of(A100, devices, 8, 200, "HDR200", "Narayanan et al. 2021: eight HDR InfiniBand adapters of 200 Gb/s a node")


def megascale(devices: int) -> Topology:
    """ByteDance's cluster: eight A100 and eight 200 Gb/s adapters a node."""
    return _of(A100, devices, 8, 200, "200GbE", "MegaScale, NSDI 2024, section 3.6: eight 200 Gb/s adapters a node")


def grand_teton(devices: int) -> Topology:
    """Meta's H100 hosts: 400 Gb/s a device."""
    return _of(H100_HBM2E, devices, 8, 400, "400GbE", "torchtitan's H100 benchmark page: 400 Gb/s RDMA a GPU")


def titan_a100(devices: int) -> Topology:
    """The A100 hosts of torchtitan's first page, whose network it does not name: 200 Gb/s a device assumed."""
    return _of(A100, devices, 8, 200, "HDR200", "assumption: 200 Gb/s a GPU; torchtitan's page does not say")


def three_level(nodes: int, racks: int, outer: Level, device: Device = H100) -> Topology:
    """Eight devices a node, nodes of a rack on NDR400 (one adapter a device), and racks on `outer`."""
    inner = nvlink(device)
    rack = fabric(nodes, 8, 400, "NDR400", "SimAI: 48.5 GB/s a device")
    return Topology(device, (inner, rack, outer) if racks > 1 else (inner, rack))


def _of(device: Device, devices: int, adapters: int, gigabits: float, name: str, source: str) -> Topology:
    nodes = ceil(devices / 8)
    inner = nvlink(device)
    return Topology(device, (inner,) if nodes == 1 else (inner, fabric(nodes, adapters, gigabits, name, source)))
