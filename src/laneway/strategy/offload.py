"""Optimizer state in the host's memory: what it frees on the device and what it costs in time."""

from __future__ import annotations

from laneway.cluster.figure import Figure
from laneway.cluster.topology import Device
from laneway.sizes import HOST_BUFFER_LEAST

PCIE4 = Figure(0.8 * 32e9, "bytes/s", "PCI Express 4.0 ×16, 32 GB/s each way; 0.8 of it is an assumption for pinned copies")
PCIE5 = Figure(0.8 * 64e9, "bytes/s", "PCI Express 5.0 ×16, 64 GB/s each way; 0.8 of it is an assumption for pinned copies")
HOST_LINKS = {"A100": PCIE4, "H100": PCIE5, "H200": PCIE5, "B200": PCIE5, "MI300X": PCIE5}
HOST_MEMORY = Figure(HOST_BUFFER_LEAST, "host bytes per device byte", "the sizing rule of the tiered memory, an assumption here")


def host_link(device: Device) -> Figure | None:
    """Bytes per second and direction between a device and its host; None where the device is the host, or unknown."""
    return next((link for name, link in HOST_LINKS.items() if device.name.upper().startswith(name)), None)


def offload_seconds(device: Device, optimizer_bytes: float) -> float | None:
    """Seconds a step of reading and writing the state once each (both directions at once), nothing overlapped.

    None where there is no host to take it, or where it would not hold the state.
    """
    link = host_link(device)
    if link is None or optimizer_bytes > HOST_MEMORY.value * device.memory_bytes:
        return None
    return optimizer_bytes / link.value
