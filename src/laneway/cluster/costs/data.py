"""Traffic of data parallelism in a step, by ZeRO stage, and the part of it that compute hides."""

from __future__ import annotations

from dataclasses import dataclass

from laneway.cluster.costs.calibration import Calibration
from laneway.cluster.costs.memory import BUCKET, layers_of_stage
from laneway.cluster.costs.traffic import Traffic, TrafficModel
from laneway.cluster.layout import Layout

__all__ = ["DataTraffic", "data_traffic"]


@dataclass(frozen=True)
class DataTraffic:
    """A step's traffic of gradients and weights: all of it, the seconds hidden, and those that remain exposed."""

    total: Traffic
    hidden: float
    exposed: float


def data_traffic(
    model: TrafficModel, parameters: float, micro_batches: int, forward: float, backward: float, calibration: Calibration
) -> DataTraffic:
    """What a device sends for its `parameters` in a step.

    ZeRO-1: one reduce-scatter and one all-gather a step; ZeRO-2: a reduce-scatter each micro-batch; ZeRO-3: two gathers and one
    reduce-scatter each micro-batch, layer by layer, which is what makes long rings dear. Else messages are buckets of
    `BUCKET` elements. Replicas all-reduce once a step. `forward`, `backward`: seconds of one micro-batch's
    compute (recomputation in `backward`), behind which it can hide: all micro-batches' for ZeRO-3, else one's.
    """
    layout = model.layout
    shards = layout.dp_shard * layout.cp
    layered = layout.zero >= 3 and shards > 1
    messages = layers_of_stage(model.arch, layout) if layered else max(1, round(parameters / BUCKET))
    rounds = micro_batches if layout.zero >= 2 else 1
    total = model.replicate(parameters / shards, messages)
    if shards > 1:
        gathers = 2 * micro_batches if layout.zero >= 3 else 1
        total = total + model.scatter(parameters, messages).times(rounds) + model.gather(parameters, messages).times(gathers)
    room = _room(layout, micro_batches, forward, backward) * calibration.overlap_fraction
    hidden = min(total.seconds, room) if layout.overlap_grads else 0.0
    return DataTraffic(total, hidden, total.seconds - hidden + calibration.overlap_slowdown * hidden)


def _room(layout: Layout, micro_batches: int, forward: float, backward: float) -> float:
    return (forward + backward) * (micro_batches if layout.zero >= 2 else 1)
