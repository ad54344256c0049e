"""Devices, each number with where it is published. Peak FLOP/s are dense: sheets that print sparse ones are halved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from laneway.cluster.figure import Figure
from laneway.cluster.topology import Device

__all__ = ["DEVICES", "DeviceEntry"]

TERA, GIGA = 1e12, 1e9


@dataclass(frozen=True)
class DeviceEntry:
    """A device of the catalogue, and what its nodes are usually joined with.

    Attributes:
        name: the name it goes by.
        flops: peak dense FLOP/s by precision; a precision that the device lacks is absent.
        memory, memory_bandwidth, watts: as in `Device`.
        node_network: network between the devices of a node.
        fabric: network between nodes.
        wiring: where the two networks come from.
    """

    name: str
    flops: Mapping[str, Figure]
    memory: Figure
    memory_bandwidth: Figure
    watts: Figure
    node_network: str
    fabric: str
    wiring: str

    @property
    def device(self) -> Device:
        """The plain numbers."""
        sources = dict.fromkeys(f.source for f in (*self.flops.values(), self.memory, self.memory_bandwidth, self.watts))
        flops = {precision: figure.value for precision, figure in self.flops.items()}
        return Device(self.name, flops, self.memory.value, self.memory_bandwidth.value, self.watts.value, "; ".join(sources))


def _entry(
    name: str,
    source: str,
    teraflops: Mapping[str, float],
    gigabytes: float,
    gigabytes_per_s: float,
    watts: float,
    networks: tuple[str, str, str],
) -> DeviceEntry:
    return DeviceEntry(
        name,
        {precision: Figure(value * TERA, "FLOP/s", source) for precision, value in teraflops.items()},
        Figure(gigabytes * GIGA, "byte", source),
        Figure(gigabytes_per_s * GIGA, "byte/s", source),
        Figure(watts, "W", source),
        *networks,
    )


A100_SHEET = "NVIDIA A100 Tensor Core GPU data sheet, SXM"
A100_FLOPS = {"fp32": 19.5, "tf32": 156.0, "bf16": 312.0}
DGX_A100 = ("NVLink3", "HDR200", "NVIDIA DGX A100 data sheet: one HDR200 adapter for each device")
H100_SHEET = "NVIDIA H100 Tensor Core GPU Architecture white paper, SXM5, without sparsity"
H200_SHEET = "NVIDIA H200 Tensor Core GPU data sheet, SXM; FLOP/s as the H100's, whose processor it has"
HOPPER_FLOPS = {"fp32": 66.9, "tf32": 494.7, "bf16": 989.4, "fp8": 1978.9}
DGX_H100 = ("NVLink4", "NDR400", "NVIDIA DGX H100/H200 data sheet: one NDR400 adapter for each device")
B200_SHEET = "NVIDIA HGX B200 and DGX B200 data sheets, an eighth of the board; dense is half of the sparse figure"
DGX_B200 = ("NVLink5", "NDR400", "NVIDIA DGX B200 data sheet: one NDR400 adapter for each device")
MI300X_SHEET = "AMD Instinct MI300X accelerator data sheet, without sparsity"
MI300X_NODE = ("xGMI", "400GbE", "assumption: one 400 Gb/s RoCE adapter for each device, as eight-way servers are sold")
CPU_SHEET = (
    "Intel Xeon Platinum 8480+ product page: 56 cores at 2.0 GHz base, two AVX-512 units (64 FLOP a cycle in fp32) and AMX "
    "(2048 FLOP a cycle in bf16), 8 channels of DDR5-4800, 350 W; 256 GB of memory is an assumption"
)
CPU_NODE = ("loopback", "10GbE", "assumption: processes of a host talk over its loopback interface, hosts over one 10 Gb/s port")
UNKNOWN = "assumption: the type is unknown, the numbers of an A100 with 40 GB stand in"
UNKNOWN_NODE = ("PCIe4", "100GbE", "assumption: the type is unknown, so are its links")

DEVICES: dict[str, DeviceEntry] = {
    entry.name: entry
    for entry in (
        _entry("A100", A100_SHEET, A100_FLOPS, 80, 2039, 400, DGX_A100),
        _entry("A100-40GB", A100_SHEET, A100_FLOPS, 40, 1555, 400, DGX_A100),
        _entry("H100", H100_SHEET, HOPPER_FLOPS, 80, 3352, 700, DGX_H100),
        _entry("H200", H200_SHEET, HOPPER_FLOPS, 141, 4800, 700, DGX_H100),
        _entry("B200", B200_SHEET, {"fp32": 75, "tf32": 1125, "bf16": 2250, "fp8": 4500}, 180, 8000, 1000, DGX_B200),
        _entry(
            "MI300X",
            MI300X_SHEET,
            {"fp32": 163.4, "tf32": 653.7, "bf16": 1307.4, "fp8": 2614.9},
            192,
            5300,
            750,
            MI300X_NODE,
        ),
        _entry("CPU", CPU_SHEET, {"fp32": 7.168, "bf16": 229.376}, 256, 307.2, 350, CPU_NODE),
        _entry("GPU", UNKNOWN, A100_FLOPS, 40, 1555, 400, UNKNOWN_NODE),
    )
}
