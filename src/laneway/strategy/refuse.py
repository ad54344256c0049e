"""What would be needed where nothing fits."""

from __future__ import annotations

import math
from dataclasses import replace

from laneway.cluster.costs import memory_of
from laneway.cluster.layout import Layout
from laneway.cluster.topology import Topology
from laneway.core import InputError, LanewayError
from laneway.strategy.search import RESERVED, Found
from laneway.strategy.space import Job, divisors

MOST_NODES = 1 << 17


class DoesNotFitError(LanewayError):
    """No layout of the model fits these devices.

    Attributes:
        devices: the fewest devices of this kind, in whole nodes, that would hold it; None where no number does.
        bytes_per_device: what each of the present devices would need at least.
    """

    exit_code = 2

    def __init__(self, text: str, devices: int | None, bytes_per_device: float) -> None:
        super().__init__(text)
        self.devices, self.bytes_per_device = devices, bytes_per_device


def refusal(job: Job, found: Found) -> LanewayError:
    """The error to raise where a search found nothing that fits."""
    if found.grids == 0:
        return no_division(job)
    assert found.smallest is not None
    layout, least = found.smallest
    device, world = job.topology.device, job.topology.world
    wanted = least / (1 - RESERVED)
    devices = fewest_devices(job)
    more = f"≥ {devices} devices like these" if devices else "devices with more memory"
    each = f"{wanted / 1e9:.1f} GB on each {device.name} of {device.memory_bytes / 1e9:.0f} GB"
    smallest = f"the smallest plan needs {each} ({world} devices, tp={layout.tp} pp={layout.pp} sharded over {layout.dp_shard})"
    wants = f"needs {more}, or ≥ {math.ceil(wanted / 1e9)} GB each, or a smaller model"
    return DoesNotFitError(f"does not fit: {smallest}; {wants}", devices, wanted)


def no_division(job: Job) -> InputError:
    """No layout divides the batch: names the nearest batches that would do."""
    world, batch = job.topology.world, job.global_batch
    least = data_ranks(job)
    if not least:
        fixed = ", ".join(f"{name}={value}" for name, value in job.fixed) or "the model's sizes"
        return InputError("layout", fixed, f"degrees whose product divides {world} devices and that divide the model")
    options = sorted({size for ranks in least for size in (batch // ranks * ranks, -(-batch // ranks) * ranks) if size > 0})
    near = sorted(options, key=lambda size: (abs(size - batch), size))[:3]
    named = " or ".join(str(size) for size in sorted(near))
    return InputError("global_batch", batch, f"sequences that the data-parallel ranks divide, such as {named}")


def data_ranks(job: Job) -> list[int]:
    """Numbers of data-parallel ranks that some layout of all devices would have."""
    world, arch = job.topology.world, job.arch
    node = math.gcd(*(job.topology.levels[0].counts or (job.topology.levels[0].size,)))
    fixed = dict(job.fixed)
    tps = [tp for tp in divisors(node) if arch.heads % tp == 0 and fixed.get("tp", tp) == tp]
    pps = [pp for pp in divisors(arch.layers) if fixed.get("pp", pp) == pp]
    return sorted({world // (tp * pp) for tp in tps for pp in pps if world % (tp * pp) == 0})


def fewest_devices(job: Job) -> int | None:
    """The fewest devices of this kind, in whole nodes, on which the model fits with a batch that divides."""
    node = max(job.topology.levels[0].counts or (job.topology.levels[0].size,))
    high = 1
    while not _holds(job, node, high):
        high *= 2
        if high > MOST_NODES:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _holds(job, node, middle) else (middle, high)
    return node * high


def _holds(job: Job, node: int, nodes: int) -> bool:
    """Whether the most sparing layout on ``nodes`` nodes fits: all sharded, everything recomputed, one sequence at a time."""
    world, room = node * nodes, (1 - RESERVED) * job.topology.device.memory_bytes
    for tp in (tp for tp in divisors(node) if job.arch.heads % tp == 0):
        for pp in (pp for pp in divisors(job.arch.layers) if world % (tp * pp) == 0):
            shard = world // (tp * pp)
            layout = Layout(tp=tp, pp=pp, dp_shard=shard, recompute="full", sequence_parallel=tp > 1, zero=3 if pp == 1 else 1)
            layout = replace(layout, precision=job.precision)
            if memory_of(job.arch, layout, seq_len=job.seq_len).total <= room:
                return True
    return False


def scaled_topology(topology: Topology, world: int) -> Topology:
    """The topology with more or fewer members on its outermost level.

    Raises:
        InputError: ``world`` is no multiple of what one member of that level holds.
    """
    at = len(topology.levels) - 1
    inner = topology.devices_in(at - 1) if at else 1
    if topology.levels[0].counts is not None:
        raise InputError("world", world, f"{topology.world}: nodes of different sizes can't be scaled", "give a new topology")
    if world < inner or world % inner:
        raise InputError("world", world, f"a multiple of {inner}, the devices of one {topology.levels[at].name} member")
    outer = replace(topology.levels[at], size=world // inner)
    return replace(topology, levels=(*topology.levels[:at], outer), hosts=())
