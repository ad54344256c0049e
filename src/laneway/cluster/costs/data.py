"""Traffic of data parallelism in a step, by ZeRO stage, and the part of it that compute hides."""

from __future__ import annotations

from dataclasses import dataclass

from laneway.cluster.architecture import Architecture
from laneway.cluster.costs.calibration import Calibration
from laneway.cluster.costs.memory import BUCKET, layers_of_stage, parameters_on_device
from laneway.cluster.costs.placement import Group
from laneway.cluster.costs.traffic import Traffic, TrafficModel
from laneway.cluster.layout import Layout

__all__ = ["DataTraffic", "Shared", "data_traffic", "shared_parameters"]


@dataclass(frozen=True)
class DataTraffic:
    """A step's traffic of gradients and weights: all of it, the seconds hidden, and those that remain exposed."""

    total: Traffic
    hidden: float
    exposed: float


@dataclass(frozen=True)
class Shared:
    """Parameters of one device whose gradients are reduced together.

    Attributes:
        parameters: how many, before any sharding over data.
        shards: ranks that share them (a group with a stride).
        messages: pieces that one reduction or gather of them has.
    """

    parameters: float
    shards: Group
    messages: int


def shared_parameters(arch: Architecture, layout: Layout) -> list[Shared]:
    """Dense parameters over all dp_shard × cp ranks; experts over those of them that hold the same ones.

    With ZeRO-3 a message is a layer; else it is a bucket of `BUCKET` elements.
    """
    dense, experts, ends = parameters_on_device(arch, layout)
    shards = layout.dp_shard * layout.cp
    layered = layout.zero >= 3 and shards > 1
    same = Group(max(1, shards // layout.ep), layout.tp * layout.ep)
    found = []
    for parameters, over in ((dense + ends, Group(shards, layout.tp)), (experts, same)):
        messages = layers_of_stage(arch, layout) if layered else max(1, round(parameters / BUCKET))
        if parameters:
            found.append(Shared(parameters, over, messages))
    return found


def data_traffic(
    model: TrafficModel, micro_batches: int, forward: float, backward: float, calibration: Calibration
) -> DataTraffic:
    """What a device sends for its parameters in a step.

    ZeRO-1: one reduce-scatter and one all-gather a step; ZeRO-2: a reduce-scatter each micro-batch; ZeRO-3: two gathers and one
    reduce-scatter each micro-batch, layer by layer, which is what makes long rings dear. Replicas all-reduce once a step.
    `forward`, `backward`: seconds of one micro-batch's compute (recomputation in `backward`), behind which it can hide: all
    micro-batches' from ZeRO-2 on, else one's.
    """
    layout = model.layout
    rounds = micro_batches if layout.zero >= 2 else 1
    gathers = 2 * micro_batches if layout.zero >= 3 else 1
    total = Traffic()
    for part in shared_parameters(model.arch, layout):
        size, messages = part.shards.size, part.messages
        total = total + model.replicate(part.parameters / size, messages)
        if size > 1:
            total = total + model.scatter(part.parameters, part.shards, messages).times(rounds)
            total = total + model.gather(part.parameters, part.shards, messages).times(gathers)
    room = _room(layout, micro_batches, forward, backward) * calibration.overlap_fraction
    hidden = min(total.seconds, room) if layout.overlap_grads else 0.0
    return DataTraffic(total, hidden, total.seconds - hidden + calibration.overlap_slowdown * hidden)


def _room(layout: Layout, micro_batches: int, forward: float, backward: float) -> float:
    return (forward + backward) * (micro_batches if layout.zero >= 2 else 1)
