"""What would be needed where nothing fits."""

from __future__ import annotations

import math
from dataclasses import replace

from laneway.cluster.costs import Calibration, memory_of
from laneway.cluster.topology import Level, Topology
from laneway.core import InputError, LanewayError
from laneway.strategy.search import RESERVED, Found
from laneway.strategy.space import Job, degrees, zero_of

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


def refusal(job: Job, found: Found, calibration: Calibration | None = None) -> LanewayError:
    """The error to raise where a search found nothing that fits."""
    if found.smallest is None:
        return no_division(job)
    layout, least = found.smallest
    device, world = job.topology.device, job.topology.world
    wanted = least / (1 - RESERVED)
    devices = fewest_devices(job, calibration)
    each = f"{wanted / 1e9:.1f} GB on each {device.name} of {device.memory_bytes / 1e9:.0f} GB"
    smallest = f"the smallest plan needs {each} ({world} devices, tp={layout.tp} pp={layout.pp} sharded over {layout.dp_shard})"
    wants = f"needs {_more(job, devices)}, or ≥ {math.ceil(wanted / 1e9)} GB each, or a smaller model"
    return DoesNotFitError(f"does not fit: {smallest}; {wants}", devices, wanted)


def _more(job: Job, devices: int | None) -> str:
    world = job.topology.world
    if devices is None:
        return "devices with more memory"
    if devices > world:
        return f"≥ {devices} devices like these"
    if devices == world:
        return "another global_batch, which leaves room for more model parallelism or sharding"
    return f"another number of devices, such as {devices}, or another global_batch: {world} and this batch divide badly"


def no_division(job: Job) -> InputError:
    """No layout divides: names the degree that can't be had, or the nearest batches that would do."""
    batch = job.global_batch
    units = batch_units(job)
    if not units:
        return _impossible_degree(job)
    options = sorted({size for unit in units for size in (batch // unit * unit, -(-batch // unit) * unit) if size > 0})
    near = sorted(options, key=lambda size: (abs(size - batch), size))[:3]
    named = " or ".join(str(size) for size in sorted(near))
    return InputError("global_batch", batch, f"sequences that the data-parallel ranks divide, such as {named}")


def _impossible_degree(job: Job) -> InputError:
    """The first fixed degree without which a layout exists, with the values that it could have beside the others."""
    for name, value in job.fixed:
        others = tuple(pair for pair in job.fixed if pair[0] != name)
        possible = sorted({getattr(layout, name) for layout in degrees(replace(job, fixed=others))})
        if possible:
            accepted = f"what divides {job.topology.world} devices and the model, here {', '.join(map(str, possible))}"
            return InputError(f"fixed.{name}", value, accepted)
    fixed = " ".join(f"{name}={value}" for name, value in job.fixed)
    return InputError("fixed", fixed, f"degrees whose product divides {job.topology.world} devices and that divide the model")


def batch_units(job: Job) -> list[int]:
    """Sequences of which a batch must be a multiple: data-parallel ranks (times a fixed micro-batch) of each possible layout."""
    each = dict(job.fixed).get("micro_batch", 1)
    return sorted({layout.dp * each for layout in degrees(job)})


def fewest_devices(job: Job, calibration: Calibration | None = None) -> int | None:
    """The fewest devices of this kind, in whole nodes, on which the model fits with a batch that divides."""
    node = max(job.topology.levels[0].counts or (job.topology.levels[0].size,))
    high, flash = 1, (calibration or Calibration()).flash_attention
    while not _holds(job, node, high, flash):
        high *= 2
        if high > MOST_NODES:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _holds(job, node, middle, flash) else (middle, high)
    return node * high


def _holds(job: Job, node: int, nodes: int, flash: bool) -> bool:
    """Whether a layout fits on ``nodes`` nodes with everything recomputed, a sequence at a time (or the fixed micro-batch)."""
    inside, outside = job.topology.levels[0], Level("L2", nodes, 0.0, 1.0)
    larger = Topology(job.topology.device, (replace(inside, size=node, counts=None), outside))
    room, each = (1 - RESERVED) * job.topology.device.memory_bytes, dict(job.fixed).get("micro_batch", 1)
    for grid in degrees(replace(job, topology=larger)):
        layout = replace(grid, recompute="full", zero=zero_of(grid), micro_batch=each)
        if memory_of(job.arch, layout, seq_len=job.seq_len, flash=flash).total <= room:
            return True
    return False


def scaled_topology(topology: Topology, world: int) -> Topology:
    """The topology with more or fewer members on its outermost level.

    Raises:
        InputError: ``world`` is no multiple of what one member of that level holds.
    """
    at = len(topology.levels) - 1
    inner = topology.devices_in(at - 1) if at else 1
    if any(level.counts is not None for level in topology.levels):
        raise InputError(
            "world", world, f"{topology.world}: groups of different sizes can't be scaled", "plan for a new topology"
        )
    if world < inner or world % inner:
        raise InputError("world", world, f"a multiple of {inner}, the devices of one {topology.levels[at].name} member")
    outer = replace(topology.levels[at], size=world // inner)
    return replace(topology, levels=(*topology.levels[:at], outer), hosts=())
