"""The claims for gradient synchronisation, exposed communication, bytes and energy: simulated on stated networks and baselines.

Nothing here was measured: every row says what network, what baseline and what layout the cost model was given.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from laneway.bench.planner_machines import three_level
from laneway.bench.rows import Row
from laneway.cluster.architecture import Architecture
from laneway.cluster.costs import (
    ALGORITHMS,
    Group,
    choose_collective,
    collective_bytes,
    collective_time,
    estimate_step,
    native_time,
    parameters_of,
)
from laneway.cluster.layout import Layout
from laneway.cluster.topology import Level, Topology

RESNET152 = 60.19e6
"""Parameters of ResNet-152 (He et al. 2016)."""
OUTER: dict[str, tuple[float, float, str]] = {
    "400GbE per device, non-blocking": (45e9 * 128, 17.5e-6, "RoCE, 45 of 50 GB/s a device"),
    "400GbE per device, 4:1": (45e9 * 128 / 4, 20e-6, "the same with 4:1 oversubscription"),
    "100GbE per node": (11.25e9 * 16, 25e-6, "one 100 Gb/s port a node of eight"),
    "25GbE per node": (2.8e9 * 16, 30e-6, "one 25 Gb/s port a node of eight, TCP"),
}
"""Bytes per second of a rack of 16 nodes of 8 onto the network between racks, its latency, and what it stands for."""
SCHEMES = ("ring_worst", "ring", "tree", "nvls_tree", "two_level", "hierarchy", "torus")
GPT175 = Architecture(96, 12288, 96, 96, 4 * 12288, 51200)
SEQ_LEN, BATCH = 2048, 2048
EXPOSED_NETWORK = "400GbE per device, 4:1"


def machine(network: str, racks: int = 32) -> Topology:
    """8 H100 a node, 16 nodes a rack on NDR400, and racks on one of `OUTER`."""
    bandwidth, latency, source = OUTER[network]
    return three_level(16, racks, Level("L3", racks, latency, bandwidth, network=network, source=source))


def gradient_sync() -> list[Row]:
    """Sync of ResNet-152's gradients on 4096 devices: every network and scheme, and what `choose_collective` takes."""
    return [row for network in OUTER for row in _sync(network)]


def _sync(network: str) -> Iterator[Row]:
    topology, nbytes = machine(network), 4 * RESNET152
    chosen = choose_collective("all_reduce", nbytes, topology)
    for scheme in (*SCHEMES, "chosen"):
        seconds = chosen.seconds if scheme == "chosen" else collective_time("all_reduce", nbytes, topology, algorithm=scheme)
        yield {
            "network": network,
            "scheme": scheme,
            "devices": topology.world,
            "sync_ms": 1e3 * seconds.value,
            "sync_low_ms": 1e3 * seconds.low,
            "sync_high_ms": 1e3 * seconds.high,
            "over_chosen": seconds.value / chosen.seconds.value,
            "algorithm": f"{chosen.algorithm}, {chosen.chunks} chunks" if scheme == "chosen" else scheme,
            "assumption": f"60.19 M fp32 gradients in one message; 8 × 16 × 32 H100, NDR400 in a rack; {OUTER[network][2]}",
        }


def layouts() -> dict[str, tuple[Layout, str, str]]:
    """What is compared on 2048 devices: layout, algorithm of gradients, and the words for it."""
    flat = Layout(dp_shard=2048, recompute="full", zero=3, overlap_grads=False)
    planned = Layout(
        tp=8, pp=8, chunks=6, dp_shard=32, recompute="selective", sequence_parallel=True, zero=1, grad_bytes=2, micro_batch=1
    )
    late = replace(planned, overlap_grads=False, grad_bytes=4)
    return {
        "flat, bad order": (
            flat,
            "ring_worst",
            "FSDP over all ranks, fp32 gradients, nothing overlapped, ring in the worst order",
        ),
        "flat": (flat, "native", "the same, gathers and scatters by rings in topology order"),
        "flat, overlapped": (replace(flat, overlap_grads=True), "native", "the same, overlapped with compute"),
        "3D, not overlapped": (late, "native", "tp 8, pp 8 with 6 chunks, dp 32, fp32 gradients after the backward pass"),
        "planned": (planned, "auto", "the same layout, bf16 gradients beside the backward pass, collectives as chosen"),
    }


def exposed() -> list[Row]:
    """Exposed communication, cross-node bytes and energy of a 175-billion-parameter step on 2048 H100."""
    topology = machine(EXPOSED_NETWORK, 16)
    rows = []
    for name, (layout, algorithm, words) in layouts().items():
        found = estimate_step(GPT175, layout, topology, global_batch=BATCH, seq_len=SEQ_LEN, algorithm=algorithm)
        outside = sum(nbytes for level, nbytes in found.bytes_per_level.items() if level != "L1")
        rows.append(
            {
                "layout": name,
                "devices": topology.world,
                "step_s": found.seconds.value,
                "step_low_s": found.seconds.low,
                "step_high_s": found.seconds.high,
                "exposed_s": found.exposed_communication,
                "exposed_share": found.exposed_communication / found.seconds.value,
                "bubble_s": found.breakdown["bubble"],
                "mfu": found.mfu,
                "cross_node_gb": outside / 1e9,
                "kwh_per_token": found.kwh_per_token,
                "memory_gb": found.memory.total / 1e9,
                "assumption": f"{BATCH} sequences of {SEQ_LEN}; 8 × 16 × 16 H100; {EXPOSED_NETWORK} between racks; {words}",
            }
        )
    return rows


def cross_node_bytes() -> list[Row]:
    """Bytes that leave a node in a step for each parameter, by scheme: counted, no time involved."""
    topology = machine("400GbE per device, non-blocking")
    nodes = topology.world // 8
    count = float(parameters_of(GPT175))

    def sent(op: str, element: float, algorithm: str, group: Group | None = None, share: float = 1.0) -> float:
        found = collective_bytes(op, count * share * element, topology, algorithm=algorithm, group=group)
        outside = max((nbytes for level, nbytes in found.items() if level != "L1"), default=0.0)
        return outside * 8 / count

    across = Group(nodes, 8)
    sharded = sent("all_gather", 2, "ring") * 2
    schemes = {
        "all-reduce, worst ring, fp32": (sent("all_reduce", 4, "ring_worst"), "replicated model"),
        "all-reduce, ordered ring, fp32": (sent("all_reduce", 4, "ring"), "replicated model"),
        "all-reduce, hierarchy, fp32": (sent("all_reduce", 4, "hierarchy"), "replicated model"),
        "FSDP over all ranks, fp32 gradients": (
            sharded + sent("reduce_scatter", 4, "ring"),
            "two bf16 gathers and one reduction",
        ),
        "FSDP over all ranks, bf16 gradients": (
            sharded + sent("reduce_scatter", 2, "ring"),
            "two bf16 gathers and one reduction",
        ),
        "HSDP, shard in the node, fp32": (sent("all_reduce", 4, "ring", across, 1 / 8), "weights gathered inside the node only"),
        "HSDP, shard in the node, bf16": (sent("all_reduce", 2, "ring", across, 1 / 8), "weights gathered inside the node only"),
        "HSDP, shard in the node, int8": (
            sent("all_reduce", 1 + 4 / 128, "ring", across, 1 / 8),
            "weights gathered inside the node only; one fp32 scale for each block of 128",
        ),
    }
    base = schemes["FSDP over all ranks, fp32 gradients"][0]
    return [
        {
            "scheme": name,
            "bytes_per_parameter": nbytes,
            "saved": 1 - nbytes / base,
            "assumption": f"bytes out of a node of 8 a parameter and step, {nodes} nodes; {words}; saved: against FSDP with fp32",
        }
        for name, (nbytes, words) in schemes.items()
    ]


def sweep(sizes: tuple[int, ...], bandwidths: tuple[float, ...]) -> list[Row]:
    """Every scheme over message size and the bandwidth between racks: which one wins, and whether native is kept."""
    return [
        _cell(op, nbytes, gigabytes) for op in ("all_reduce", "reduce_scatter") for gigabytes in bandwidths for nbytes in sizes
    ]


def _cell(op: str, nbytes: int, gigabytes: float) -> Row:
    outer = Level("L3", 32, 20e-6, gigabytes * 1e9 * 128, source=f"{gigabytes:g} GB/s a device")
    topology = three_level(16, 32, outer)
    chosen = choose_collective(op, nbytes, topology)
    native, native_seconds = native_time(op, nbytes, topology)
    known = ALGORITHMS[op]
    times = {
        f"{scheme}_ms": 1e3 * collective_time(op, nbytes, topology, algorithm=scheme).value if scheme in known else None
        for scheme in SCHEMES
    }
    return {
        "op": op,
        "outer_gb_s": gigabytes,
        "message_bytes": nbytes,
        **times,
        "native": native,
        "native_ms": 1e3 * native_seconds.value,
        "chosen": chosen.algorithm,
        "chosen_chunks": chosen.chunks,
        "chosen_ms": 1e3 * chosen.seconds.value,
        "native_kept": int(chosen.native),
        "assumption": "8 × 16 × 32 H100, NDR400 in a rack, 20 µs between racks; bandwidth between racks a device",
    }
