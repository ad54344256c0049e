"""Published tables of training speed whose settings are known: measured against predicted, all rows shown.

Left out, because their settings are not published beside the figures we have: Megatron-Core's weak-scaling table and MLPerf's
GPT-3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from laneway.bench import planner_machines as machines
from laneway.bench.rows import Row
from laneway.cluster.architecture import Architecture
from laneway.cluster.costs import Calibration, estimate_step
from laneway.cluster.estimate import Estimate
from laneway.cluster.layout import Layout
from laneway.cluster.topology import Topology

SELENE = "Korthikanti et al. 2022, table 5; shapes and layouts of its table 3"
MEGASCALE = "Jiang et al. 2024 (MegaScale), table 2; shapes of its table 1"
TITAN_H100 = "torchtitan benchmarks/llama3_h100_202412_torchtitan.md"
TITAN_A100 = "torchtitan docs/performance.md"


COMPILED = Calibration()
"""Elementwise kernels fused."""
EAGER = Calibration(elementwise_factor=2.5)
"""PyTorch's kernels one by one."""


@dataclass(frozen=True)
class Published:
    """One published figure: seconds of a step, and what was trained on what."""

    table: str
    name: str
    seconds: float
    architecture: Architecture
    layout: Layout
    global_batch: int
    seq_len: int
    machine: Callable[[int], Topology]
    calibration: Calibration
    assumption: str
    half_recomputed: bool = False
    """Every second product is recomputed: the mean of none and full."""


def _gpt(layers: int, hidden: int, heads: int, vocab: int = 51200) -> Architecture:
    return Architecture(layers, hidden, heads, heads, 4 * hidden, vocab)


def _llama(layers: int, hidden: int, heads: int, kv: int, ffn: int, vocab: int = 128256) -> Architecture:
    return Architecture(layers, hidden, heads, kv, ffn, vocab, gated=True, tied=False)


def selene() -> list[Published]:
    """Selective and full recomputation on A100s, 22 billion to 1 trillion parameters; no data parallelism."""
    models = {
        "22B": (_gpt(48, 6144, 64), 1, 4, 4, 1, 1.42, 1.10),
        "175B": (_gpt(96, 12288, 96), 8, 64, 1, 3, 18.13, 13.75),
        "530B": (_gpt(105, 20480, 128), 35, 280, 1, 3, 49.05, 37.83),
        "1T": (_gpt(128, 25600, 160), 64, 512, 1, 1, 94.42, 71.49),
    }
    found = []
    for name, (arch, pp, batch, micro, chunks, full, selective) in models.items():
        base = {"tp": 8, "pp": pp, "micro_batch": micro, "chunks": chunks, "zero": 1, "overlap_grads": False}
        for kind, seconds in (("full", full), ("selective", selective)):
            layout = Layout(**base, recompute=kind, sequence_parallel=kind == "selective")
            told = f"tp 8, pp {pp}, {chunks} chunks, micro-batch {micro}; {kind} recomputation"
            told += " with sequence parallelism" if kind == "selective" else ""
            found.append(
                Published(
                    SELENE, f"{name}, {kind}", seconds, arch, layout, batch, 2048, machines.selene, machines.MEGATRON_ERA, told
                )
            )
    return found


def megascale() -> list[Published]:
    """175 billion parameters on up to 12,288 A100s: Megatron-LM's rows and MegaScale's own.

    The paper's table 3 lists what MegaScale adds: among it a fused attention and gradients beside the backward pass.
    """
    megatron = {1024: 11.9, 3072: 29.02, 6144: 14.78, 8192: 12.24, 12288: 8.57}
    theirs = {256: 32.0, 512: 16.5, 768: 11.5, 1024: 8.9, 3072: 23.66, 6144: 12.21, 8192: 9.56, 12288: 6.34}
    told = "tp 8, pp 8, 6 chunks, sequence parallelism; assumed: micro-batch 1, selective recomputation, fp32 gradients, ZeRO-1"
    extra = "; fused attention, gradients overlapped; its parallel blocks and sliding windows are not modelled"
    systems = (
        ("Megatron-LM", megatron, machines.MEGATRON_ERA, f"{told}; scores kept, gradients not overlapped"),
        ("MegaScale", theirs, Calibration(), told + extra),
    )
    arch = _gpt(96, 12288, 128, 64000)
    layout = Layout(tp=8, pp=8, chunks=6, zero=1, recompute="selective", sequence_parallel=True, grad_bytes=4)
    found = []
    for system, rows, calibration, assumption in systems:
        for devices, seconds in rows.items():
            mine = replace(layout, dp_shard=devices // 64, overlap_grads=system == "MegaScale")
            batch = 768 if devices <= 1024 else 6144
            name = f"{system}, {devices}"
            shape = (arch, mine, batch, 2048, machines.megascale, calibration, assumption)
            found.append(Published(MEGASCALE, name, seconds, *shape))
    return found


SMALL, LARGE, HUGE = (
    _llama(32, 4096, 32, 8, 14336),
    _llama(80, 8192, 64, 8, 28672),
    _llama(126, 16384, 128, 8, 53248),
)
THIRTEEN, OLDER = _llama(40, 5120, 40, 40, 13824, 32000), _llama(80, 8192, 64, 8, 28672, 32000)
HALF = "FSDP2; every second product recomputed, counted as the mean of no and full recomputation"


def torchtitan() -> list[Published]:
    """Llama 3.1 on H100s with FSDP2, with tensor and pipeline parallelism: from tokens per second and device."""
    found = []
    for devices, eager, compiled, narrow in ((8, 5762, 6667, 8532), (128, 5605, 6514, 8380)):
        wide = Layout(dp_shard=devices, micro_batch=2)
        fp8 = replace(wide, precision="fp8")
        batch = 2 * devices
        name = f"8B, {devices} H100"
        found += [
            _titan(name, SMALL, wide, batch, eager, f"{HALF}; eager kernels", calibration=EAGER, half=True),
            _titan(f"{name}, compiled", SMALL, wide, batch, compiled, HALF, half=True),
            _titan(f"{name}, compiled, fp8", SMALL, fp8, batch, narrow, HALF, half=True),
        ]
    full = "full recomputation, fp8 linear layers"
    two = Layout(tp=8, dp_shard=32, micro_batch=16, precision="fp8", recompute="full", sequence_parallel=True)
    found.append(_titan("70B, 256 H100, fp8", LARGE, two, 512, 829, f"FSDP 32, tp 8; {full}"))
    for name, chunks, rate in (("1F1B", 1, 100), ("interleaved", 2, 128)):
        told = f"FSDP 8, tp 8, pp 8; assumed: micro-batch 1, {full}, ZeRO-2 within the pipeline, {chunks} chunks"
        layout = replace(two, pp=8, dp_shard=8, micro_batch=1, zero=2, chunks=chunks)
        found.append(_titan(f"405B, 512 H100, fp8, {name}", HUGE, layout, 256, rate, told))
    return found


def torchtitan_a100() -> list[Published]:
    """Llama 2 and 3 on 64 A100s with FSDP2."""
    old = "64 A100, eager kernels; assumed: 200 Gb/s a GPU"
    wide, full = Layout(dp_shard=64), Layout(dp_shard=64, recompute="full")
    rest = {"table": TITAN_A100, "machine": machines.titan_a100, "calibration": EAGER}
    return [
        _titan("Llama 3 8B, 64 A100", SMALL, wide, 64, 2973, f"{old}; {HALF}", half=True, **rest),
        _titan("Llama 3 70B, 64 A100", LARGE, full, 64, 331, f"{old}; full recomputation", **rest),
        _titan(
            "Llama 2 13B, 64 A100", THIRTEEN, replace(wide, micro_batch=2), 128, 2162, f"{old}; nothing recomputed", 4096, **rest
        ),
        _titan("Llama 2 70B, 64 A100", OLDER, replace(full, micro_batch=2), 128, 353, f"{old}; full recomputation", 4096, **rest),
    ]


def _titan(
    name: str,
    arch: Architecture,
    layout: Layout,
    batch: int,
    tokens_per_s: float,
    told: str,
    seq_len: int = 8192,
    *,
    half: bool = False,
    table: str = TITAN_H100,
    machine: Callable[[int], Topology] = machines.grand_teton,
    calibration: Calibration = COMPILED,
) -> Published:
    seconds = batch * seq_len / (tokens_per_s * layout.world)
    return Published(table, name, seconds, arch, layout, batch, seq_len, machine, calibration, told, half)


def compare() -> list[Row]:
    """One row for each published figure."""
    return [_row(each) for each in (*selene(), *megascale(), *torchtitan(), *torchtitan_a100())]


def _row(each: Published) -> Row:
    layouts = [each.layout]
    if each.half_recomputed:
        layouts.append(replace(each.layout, recompute="full"))
    found = [_estimate(each, layout) for layout in layouts]

    def mean(get: Callable[[Estimate], float]) -> float:
        return sum(get(estimate) for estimate in found) / len(found)

    predicted = mean(lambda estimate: estimate.seconds.value)
    return {
        "table": each.table,
        "name": each.name,
        "devices": each.layout.world,
        "measured_s": each.seconds,
        "predicted_s": predicted,
        "predicted_low_s": mean(lambda estimate: estimate.seconds.low),
        "predicted_high_s": mean(lambda estimate: estimate.seconds.high),
        "error": predicted / each.seconds - 1,
        "mfu": mean(lambda estimate: estimate.mfu),
        "exposed_s": mean(lambda estimate: estimate.exposed_communication),
        "assumption": each.assumption,
    }


def _estimate(each: Published, layout: Layout) -> Estimate:
    return estimate_step(
        each.architecture,
        layout,
        each.machine(layout.world),
        global_batch=each.global_batch,
        seq_len=each.seq_len,
        calibration=each.calibration,
        algorithm="native",
    )
