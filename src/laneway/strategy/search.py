"""All plans that fit, the fastest first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from laneway.cluster.costs import Calibration, estimate_step, memory_of
from laneway.cluster.estimate import Estimate, MemoryEstimate
from laneway.cluster.layout import Layout
from laneway.strategy.offload import offload_seconds
from laneway.strategy.space import Job, dials, grids

# Kept free on each device for what the allocator can't use: an assumption.
RESERVED = 0.05
DEFAULT = Calibration()


@dataclass(frozen=True)
class Candidate:
    """A plan that fits: its layout, whether the optimizer's state lives on the host, and what it is predicted to cost."""

    layout: Layout
    offload: bool
    estimate: Estimate

    @property
    def order(self) -> tuple[float, ...]:
        """Fastest first; among equals the simpler one, always the same."""
        it = self.layout
        return (self.estimate.seconds.value, self.offload, it.pp, it.tp, it.cp, it.ep, it.chunks, -it.micro_batch, it.dp_shard)


@dataclass
class Found:
    """What a search came to.

    Attributes:
        candidates: those that fit, fastest first.
        smallest: the layout that needs the fewest bytes on a device, fitting or not, and those bytes.
        grids: layouts that use all devices and divide the batch; 0 says that no plan divides it.
    """

    candidates: list[Candidate] = field(default_factory=list)
    smallest: tuple[Layout, float] | None = None
    grids: int = 0


def search(job: Job, calibration: Calibration | None = None) -> Found:
    """Look at every layout; recompute only as much as memory asks for, and move state to the host only where that helps."""
    found = Found()
    for grid in grids(job):
        found.grids += 1
        for group in dials(job, grid):
            _consider(job, group, found, calibration)
    found.candidates.sort(key=lambda candidate: candidate.order)
    return found


def held_by(job: Job, layout: Layout, calibration: Calibration | None = None) -> MemoryEstimate:
    """Bytes of the layout on the fullest device, as its estimate has them."""
    micro_batches = max(1, job.global_batch // (layout.dp * layout.micro_batch))
    flash = (calibration or DEFAULT).flash_attention
    return memory_of(job.arch, layout, seq_len=job.seq_len, micro_batches=micro_batches, flash=flash)


def usable_bytes(job: Job) -> float:
    """Bytes of a device that a plan may fill."""
    return (1 - RESERVED) * job.topology.device.memory_bytes


def _consider(job: Job, group: Iterable[Layout], found: Found, calibration: Calibration | None) -> None:
    """Of layouts that differ in recomputation: the first that fits, and the first that would with the state on the host."""
    room, moved = usable_bytes(job), False
    for layout in group:
        memory = held_by(job, layout, calibration)
        if found.smallest is None or memory.total < found.smallest[1]:
            found.smallest = layout, memory.total
        if memory.total <= room:
            found.candidates.append(Candidate(layout, False, _estimate(job, layout, calibration)))
            return
        if not moved and memory.total - memory.optimizer <= room:
            moved = _move(job, layout, memory, found, calibration)


def _move(job: Job, layout: Layout, memory: MemoryEstimate, found: Found, calibration: Calibration | None) -> bool:
    seconds = offload_seconds(job.topology.device, memory.optimizer)
    if seconds is None:
        return False
    found.candidates.append(Candidate(layout, True, moved_to_host(job, _estimate(job, layout, calibration), seconds)))
    return True


def _estimate(job: Job, layout: Layout, calibration: Calibration | None) -> Estimate:
    return estimate_step(
        job.arch, layout, job.topology, global_batch=job.global_batch, seq_len=job.seq_len, calibration=calibration
    )


def moved_to_host(job: Job, estimate: Estimate, seconds: float) -> Estimate:
    """The estimate with the optimizer's state on the host and ``seconds`` of copies in every step."""
    before, after = estimate.seconds.value, estimate.seconds.value + seconds
    world, tokens = job.topology.world, float(job.global_batch * job.seq_len)
    return replace(
        estimate,
        seconds=replace(estimate.seconds, value=after, low=estimate.seconds.low, high=estimate.seconds.high + seconds),
        breakdown=estimate.breakdown | {"offload": seconds},
        memory=replace(estimate.memory, optimizer=0.0),
        mfu=estimate.mfu * before / after,
        kwh_per_token=estimate.kwh_per_token + world * job.topology.device.watts * seconds / 3.6e6 / tokens,
    )
