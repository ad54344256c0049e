"""Every layout that divides: degrees of parallelism that use all devices, with the dials that go with them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from laneway.cluster.architecture import Architecture
from laneway.cluster.layout import Layout, Precision, Recompute
from laneway.cluster.topology import Topology

# Context parallelism is looked at only where a sequence is long enough to be worth cutting.
LONG = 8192
LEAST_PIECE = 4096
LARGEST_MICRO_BATCH = 32
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")  # cheapest first
CHUNKS = (1, 2, 4)


@dataclass(frozen=True)
class Job:
    """What is to be trained on what.

    Attributes:
        global_batch: sequences of one optimizer step.
        fixed: degrees that are given, by the layout's field names; the others are searched.
    """

    arch: Architecture
    topology: Topology
    global_batch: int
    seq_len: int
    precision: Precision = "bf16"
    fixed: tuple[tuple[str, int], ...] = ()


def grids(job: Job) -> Iterator[Layout]:
    """All (tp, cp, pp, ep, shard × replicate) that use every device and divide the batch; micro-batch 1, nothing recomputed."""
    each = dict(job.fixed).get("micro_batch", 1)
    return (grid for grid in degrees(job) if job.global_batch % (grid.dp * each) == 0)


def degrees(job: Job) -> Iterator[Layout]:
    """The same whether they divide the batch or not."""
    fixed, world = dict(job.fixed), job.topology.world
    node = math.gcd(*(job.topology.levels[0].counts or (job.topology.levels[0].size,)))
    for tp in _allowed(fixed, "tp", (d for d in divisors(node) if splits(job.arch, d))):
        for cp in _context(job.seq_len, node // tp, fixed.get("cp")):
            for pp in _allowed(fixed, "pp", divisors(job.arch.layers)):
                data, left = divmod(world, tp * cp * pp)
                if left or data == 0:
                    continue
                for shard in _shards(job.topology, data, tp * cp, fixed.get("dp_shard")):
                    base = Layout(tp=tp, cp=cp, pp=pp, dp_shard=shard, dp_replicate=data // shard, precision=job.precision)
                    base = replace(base, sequence_parallel=tp > 1 and job.seq_len % (tp * cp) == 0, grad_bytes=4)
                    for ep in _allowed(fixed, "ep", _experts(job.arch, shard * cp)):
                        yield replace(base, ep=ep)


def dials(job: Job, grid: Layout) -> Iterator[list[Layout]]:
    """The layouts of one grid, in groups that differ in what is recomputed only, the cheapest first."""
    share = job.global_batch // grid.dp
    given = dict(job.fixed).get("micro_batch")
    for micro_batch in [given] if given else _powers(min(share, LARGEST_MICRO_BATCH)):
        if share % micro_batch:
            continue
        for chunks in _chunks(job.arch.layers // grid.pp, grid.pp, share // micro_batch):
            layout = replace(grid, micro_batch=micro_batch, chunks=chunks, zero=zero_of(grid))
            yield [replace(layout, recompute=recompute) for recompute in RECOMPUTE]


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _allowed(fixed: dict[str, int], name: str, found: Iterator[int] | list[int]) -> list[int]:
    return [value for value in found if fixed.get(name, value) == value]


def splits(arch: Architecture, tp: int) -> bool:
    """Whether tensor parallelism can cut attention, feed-forward and vocabulary evenly."""
    return not any(size % tp for size in (arch.heads, arch.kv_heads, arch.ffn, arch.vocab))


def _context(seq_len: int, room: int, given: int | None) -> list[int]:
    """Degrees of context parallelism that cut a sequence evenly, beside `room` places in a node; only the given one, if any."""
    wanted = [given] if given else _powers(max(1, seq_len // LEAST_PIECE)) if seq_len >= LONG else [1]
    return [cp for cp in wanted if cp == 1 or (seq_len % (2 * cp) == 0 and (room % cp == 0 or cp % room == 0))]


def _shards(topology: Topology, data: int, inner: int, given: int | None) -> list[int]:
    """Sizes of the sharding group: none, within each level, all; only the given one, if any."""
    if given:
        return [given] if data % given == 0 else []
    sizes = {1, data}
    for at in range(len(topology.levels)):
        inside = topology.devices_in(at) // inner
        if inside > 1 and data % inside == 0:
            sizes.add(inside)
    return sorted(sizes)


def _experts(arch: Architecture, ranks: int) -> list[int]:
    return [ep for ep in divisors(arch.experts) if ranks % ep == 0] if arch.experts else [1]


def _chunks(layers: int, pp: int, micro_batches: int) -> list[int]:
    """Chunks per pipeline rank: an interleaved schedule needs micro-batches in multiples of the stages."""
    if pp == 1:
        return [1]
    return [c for c in CHUNKS if layers % c == 0 and (c == 1 or micro_batches % pp == 0)]


def zero_of(grid: Layout) -> int:
    """FSDP's full sharding without a pipeline; with one, gathering parameters each micro-batch is what ZeRO-1 avoids."""
    return 3 if grid.dp_shard > 1 and grid.pp == 1 else 1


def _powers(most: int) -> list[int]:
    return [1 << power for power in range(most.bit_length()) if 1 << power <= most]
