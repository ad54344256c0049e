"""Networks, each number with its source: what a line carries, what collectives reach of it, the latency of a step, energy.

Latencies are those of NCCL's Simple protocol, with which large messages go. Energies are rough: published powers at full load
divided by the line rate; a port that idles draws nearly as much.
"""

from __future__ import annotations

from dataclasses import dataclass

from laneway.cluster.figure import Figure

__all__ = ["NETWORKS", "Network", "ethernet"]

GIGABIT = 1e9 / 8
TUNING = "NCCL src/graph/tuning.cc, hwLatencies, ring with the Simple protocol"
TOPO = "NCCL src/graph/topo.h"
SERDES = (
    "assumption: 10 pJ/bit, two crossings of a board-level SerDes; NVIDIA gives 1.3 pJ/bit for NVLink-C2C, 5 times better than "
    "PCIe 5 (Hot Chips 2022)"
)
INTERNET = (
    "Aslan et al. 2018, doi 10.1111/jiec.12630: 0.06 kWh/GB in 2015, halved every two years; assumption: so it went on to 2025"
)
INTERNET_JOULES = 0.06 * 3.6e6 / 1e9 / 2**5


@dataclass(frozen=True)
class Network:
    """A kind of link.

    Attributes:
        name: catalogue name.
        line_rate: bytes per second and direction of one link (of all NVLink or xGMI links of a device together).
        efficiency: share of the line rate that large collectives reach.
        latency: seconds of one step (α).
        energy: joules per byte.
        duplex: both directions at full speed at once.
        trusted: within one's own walls.
        per_device: each device has a link of its own (RDMA adapters); else each member of a level has one.
        in_node: joins the devices of a node.
    """

    name: str
    line_rate: Figure
    efficiency: Figure
    latency: Figure
    energy: Figure
    duplex: bool = True
    trusted: bool = True
    per_device: bool = False
    in_node: bool = False

    @property
    def bandwidth(self) -> float:
        """Bytes per second and direction that collectives reach on one link."""
        return self.line_rate.value * self.efficiency.value

    @property
    def source(self) -> str:
        """Where all four numbers come from."""
        parts = ("line rate", self.line_rate), ("efficiency", self.efficiency), ("latency", self.latency), ("energy", self.energy)
        return "; ".join(f"{name}: {figure.source}" for name, figure in parts)


def _inside(name: str, gigabytes: float, rate: str, reached: float, share: str, microseconds: float, latency: str) -> Network:
    return Network(
        name,
        Figure(gigabytes * 1e9, "byte/s", rate),
        Figure(reached / gigabytes, "1", share),
        Figure(microseconds * 1e-6, "s", latency),
        Figure(80e-12, "J/byte", SERDES),
        per_device=True,
        in_node=True,
    )


def _infiniband(name: str, gigabits: float, efficiency: Figure, energy: Figure) -> Network:
    rate = Figure(gigabits * GIGABIT, "byte/s", f"InfiniBand Trade Association: {name[:3]}, four lanes")
    return Network(name, rate, efficiency, Figure(14e-6, "s", TUNING), energy, per_device=True)


def _switched(gigabits: float, adapter: float, transceiver: float, port: float) -> Figure:
    """Energy of a byte from one host to another through one switch, from typical powers in watts."""
    watts = 2 * adapter + 4 * transceiver + port
    parts = f"two adapters ({adapter:g} W), four transceivers ({transceiver:g} W) and a switch port ({port:g} W)"
    return Figure(watts / (gigabits * GIGABIT), "J/byte", f"assumption: typical powers of {parts} over {gigabits:g} Gb/s")


SWITCHED, SWITCHED_SLOWER = _switched(400, 25, 8, 12), _switched(200, 20, 5, 10)


def ethernet(gigabits: float, name: str) -> Network:
    """Ethernet of any rate: from 100 Gb/s up RDMA (RoCE) with an adapter for each device, below that TCP over one port."""
    rate = Figure(gigabits * GIGABIT, "byte/s", "IEEE 802.3, the rate in the name")
    if gigabits >= 100:
        share = Figure(0.9, "1", "assumption: RoCE reaches 45 of 50 GB/s; calibrate by a probe")
        latency = Figure(17.5e-6, "s", "assumption: RoCE 15 to 20 µs, a little more than InfiniBand")
        return Network(name, rate, share, latency, SWITCHED, per_device=True)
    share = Figure(0.9, "1", "assumption: TCP; headers alone leave 0.94 with an MTU of 1500 bytes")
    latency = Figure(37.5e-6, "s", "assumption: TCP through the kernel, 25 to 50 µs")
    watts = "assumption: 20 W for two ports, two transceivers and a switch port, over the line rate"
    return Network(name, rate, share, latency, Figure(20 / (gigabits * GIGABIT), "J/byte", watts))


def _far(name: str, megabits: float, rate: str, milliseconds: float, latency: str) -> Network:
    share = Figure(0.8, "1", "assumption: several TCP streams over a shared line")
    bandwidth, alpha = Figure(megabits * 1e6 / 8, "byte/s", rate), Figure(milliseconds * 1e-3, "s", latency)
    return Network(name, bandwidth, share, alpha, Figure(INTERNET_JOULES, "J/byte", INTERNET), trusted=False)


NVLINK_LATENCY, PCIE_LATENCY = f"{TUNING}, NVLink", f"{TUNING}, PCI"
PCIE = "PCI-SIG, 16 lanes"
PCIE_SHARE = f"{TOPO}: PCI_BW 12.0 of generation 3's 15.75 GB/s; the same share is an assumption"

NETWORKS: dict[str, Network] = {
    network.name: network
    for network in (
        _inside("NVLink3", 300, "NVIDIA A100 data sheet", 12 * 20.0, f"{TOPO}: 12 × SM80_NVLINK_BW", 3.4, NVLINK_LATENCY),
        _inside("NVLink4", 450, "NVIDIA H100 data sheet", 18 * 20.6, f"{TOPO}: 18 × SM90_NVLINK_BW", 3.4, NVLINK_LATENCY),
        _inside("NVLink5", 900, "NVIDIA HGX B200 data sheet", 18 * 40.1, f"{TOPO}: 18 × SM100_NVLINK_BW", 3.4, NVLINK_LATENCY),
        _inside(
            "xGMI",
            448,
            "AMD Instinct MI300X data sheet: 7 Infinity Fabric links of 64 GB/s",
            7 * 48.0,
            "RCCL src/graph/topo.h: 7 × GFX94X_XGMI_WIDTH",
            3.4,
            "assumption: as NVLink",
        ),
        _inside("PCIe4", 31.5, PCIE, 31.5 * 12 / 15.75, PCIE_SHARE, 5.7, PCIE_LATENCY),
        _inside("PCIe5", 63, PCIE, 63 * 12 / 15.75, PCIE_SHARE, 5.7, PCIE_LATENCY),
        _infiniband(
            "NDR400",
            400,
            Figure(0.97, "1", "SimAI's NDR setting, 48.5 of 50 GB/s"),
            SWITCHED,
        ),
        _infiniband(
            "HDR200",
            200,
            Figure(0.97, "1", "assumption: as NDR400"),
            SWITCHED_SLOWER,
        ),
        _infiniband(
            "EDR100",
            100,
            Figure(0.96, "1", f"{TOPO}: NET_BW 12.0 of 12.5 GB/s"),
            SWITCHED_SLOWER,
        ),
        *(ethernet(gigabits, f"{gigabits}GbE") for gigabits in (400, 200, 100, 25, 10)),
        _far("WAN", 10_000, "assumption: 10 Gb/s between sites or clouds", 30, "assumption: a few thousand kilometres of fibre"),
        _far("Broadband", 20, "FCC 2024 broadband benchmark: 20 Mb/s upwards", 20, "assumption: a fixed line at home"),
        Network(
            "loopback",
            Figure(1e9, "byte/s", "assumption: gloo over a host's own interface; calibrate by a probe"),
            Figure(1.0, "1", "assumption: the rate is the reached one"),
            Figure(50e-6, "s", "assumption: TCP within one host and a process switch; calibrate by a probe"),
            Figure(1e-9, "J/byte", "assumption: a few copies through memory"),
            in_node=True,
        ),
    )
}
