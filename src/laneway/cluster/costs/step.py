"""One training step of a layout on a topology: seconds by part, bytes by level, memory, MFU and energy."""

from __future__ import annotations

from dataclasses import dataclass

from laneway.cluster.architecture import Architecture
from laneway.cluster.costs.calibration import Calibration
from laneway.cluster.costs.data import DataTraffic, data_traffic, shared_parameters
from laneway.cluster.costs.layers import Part, Share, layer_work, optimizer_seconds, readout_work
from laneway.cluster.costs.matmul import Machine, peak_flops
from laneway.cluster.costs.memory import layers_of_stage, memory_of
from laneway.cluster.costs.pipeline import bubble_seconds
from laneway.cluster.costs.sizes import flops_per_token
from laneway.cluster.costs.traffic import Traffic, TrafficModel
from laneway.cluster.estimate import Estimate
from laneway.cluster.figure import Interval
from laneway.cluster.layout import Layout
from laneway.cluster.topology import Topology
from laneway.core import InputError, positive_int

__all__ = ["estimate_step", "micro_batches_of"]

COMMUNICATION = ("tensor", "context", "expert", "pipeline", "data")


@dataclass(frozen=True)
class Pass:
    """One layer over one micro-batch, all passes: seconds of compute and recomputation, and of exposed communication by part."""

    forward: float
    backward: float
    recompute: float
    exposed: dict[str, float]
    hidden: dict[str, float]
    nbytes: Traffic

    @property
    def compute(self) -> float:
        """Forward and backward without recomputation."""
        return self.forward + self.backward

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.compute + self.recompute + sum(self.exposed.values())


def micro_batches_of(layout: Layout, global_batch: int) -> int:
    """Micro-batches of a step on each data-parallel rank.

    Raises:
        InputError: the batch does not divide.
    """
    positive_int("global_batch", global_batch)
    sequences = layout.dp * layout.micro_batch
    if global_batch % sequences:
        raise InputError("global_batch", global_batch, f"a multiple of dp × micro_batch = {sequences}")
    return global_batch // sequences


def estimate_step(
    arch: Architecture,
    layout: Layout,
    topology: Topology,
    *,
    global_batch: int,
    seq_len: int,
    calibration: Calibration | None = None,
    algorithm: str = "auto",
) -> Estimate:
    """What one training step costs.

    Args:
        arch, layout, topology: what is trained, how it is laid out, on what.
        global_batch: sequences of a step.
        seq_len: tokens of a sequence.
        calibration: measured constants.
        algorithm: of gradients' and experts' collectives: "auto" (`choose_collective`), "native" or one by name.

    Raises:
        InputError: sizes below 1, a batch that does not divide, more ranks than devices.
    """
    calibration = calibration or Calibration()
    positive_int("seq_len", seq_len)
    if layout.world > topology.world:
        raise InputError("layout", layout.world, f"at most the topology's {topology.world} devices")
    count = micro_batches_of(layout, global_batch)
    machine = Machine.of(topology.device, layout.precision, calibration)
    model = TrafficModel(arch, layout, topology, seq_len, calibration, algorithm)
    share = Share(layout.micro_batch, seq_len, layout.tp, layout.cp, layout.ep, layout.sequence_parallel)
    layer = _layer_pass(arch, layout, share, machine, model)
    readout = readout_work(arch, share, machine, calibration)
    layers = layers_of_stage(arch, layout)
    boundary = model.boundary()
    data = data_traffic(model, count, layers * layer.forward, layers * (layer.backward + layer.recompute), calibration)
    breakdown = _breakdown(arch, layout, layer, readout, boundary, data, count, model)
    states = sum(part.parameters / part.shards.size for part in shared_parameters(arch, layout))
    breakdown["optimizer"] = optimizer_seconds(states, machine)
    hidden = {part: count * layers * seconds for part, seconds in layer.hidden.items()} | {"data": data.hidden}
    sent = layer.nbytes.times(count * layers) + boundary.times(2 * count * layout.chunks) + data.total
    seconds = _interval(breakdown, calibration)
    tokens = float(global_batch * seq_len)
    peak = layout.world * peak_flops(topology.device, layout.precision)
    return Estimate(
        seconds=seconds,
        breakdown=breakdown,
        memory=memory_of(arch, layout, seq_len=seq_len, micro_batches=count, flash=calibration.flash_attention),
        mfu=flops_per_token(arch, seq_len) * tokens / (seconds.value * peak),
        kwh_per_token=layout.world * _joules(topology, seconds.value, sent) / 3.6e6 / tokens,
        hidden={part: found for part, found in hidden.items() if found},
        bytes_per_level=dict(sent.nbytes),
    )


def _joules(topology: Topology, seconds: float, sent: Traffic) -> float:
    """Energy of one device in a step: its full power, and that of each level for the bytes that it sends over it."""
    network = sum(level.joules_per_byte * sent.nbytes.get(level.name, 0.0) for level in topology.levels)
    return topology.device.watts * seconds + network


def _layer_pass(arch: Architecture, layout: Layout, share: Share, machine: Machine, model: TrafficModel) -> Pass:
    calibration = model.calibration
    work = layer_work(arch, share, machine, calibration)
    again = {"none": Part(0.0, 0.0, 0.0), "selective": work.inner, "full": work.whole}[layout.recompute]
    if calibration.flash_attention and layout.recompute == "selective":
        again = Part(0.0, 0.0, 0.0)  # a fused attention recomputes its scores in any case; its backward time says so
    passes = 3 if layout.recompute == "full" else 2
    tensor, expert = model.tensor(), model.expert()
    context = model.context()
    # Ring attention hides its messages behind the product on the blocks that are there; backward sends twice as much.
    turns = passes + 1
    ring = context.seconds * turns
    beside = calibration.overlap_fraction * (work.inner.forward + work.inner.backward)
    hidden = min(ring, beside)
    # Backward, gradients of inputs are summed while the products run that give gradients of weights.
    covered = min(tensor.seconds, calibration.overlap_fraction * work.column_gradients) if calibration.tensor_overlap else 0.0
    left = passes * tensor.seconds - (1 - calibration.overlap_slowdown) * covered
    exposed = {"tensor": left, "expert": passes * expert.seconds, "context": ring - hidden}
    waits = tensor.seconds + expert.seconds
    forward, backward = work.whole.seconds(waits)
    return Pass(
        forward=forward,
        backward=backward,
        recompute=again.seconds(waits if passes == 3 else 0.0)[0],
        exposed=exposed,
        hidden={"context": hidden, "tensor": covered},
        nbytes=(tensor + expert).times(passes) + context.times(turns),
    )


def _breakdown(
    arch: Architecture,
    layout: Layout,
    layer: Pass,
    readout: Part,
    boundary: Traffic,
    data: DataTraffic,
    count: int,
    model: TrafficModel,
) -> dict[str, float]:
    """Seconds of the slowest stage by part, and the bubble. Inner stages receive and send both ways, the last only half of it."""
    layers = layers_of_stage(arch, layout)
    last = max(0, arch.layers - layers * (layout.pp - 1))
    ends = sum(readout.seconds())
    hop = boundary.seconds * layout.chunks if layout.pp > 1 else 0.0
    inner, outer = layers * layer.seconds + 2 * hop, last * layer.seconds + ends + hop
    stages = [inner] * (layout.pp - 1) + [outer]
    if outer >= inner or layout.pp == 1:
        busy, extra, hops = last, ends, 1
    else:
        busy, extra, hops = layers, 0.0, 2
    jam = _interference(layout, model) * (count * max(inner, outer))
    return {
        "compute": count * (busy * layer.compute + extra),
        "recompute": count * busy * layer.recompute,
        **{part: count * busy * seconds for part, seconds in layer.exposed.items()},
        "pipeline": count * hops * hop + jam,
        "bubble": bubble_seconds(stages, layout.chunks),
        "data": data.exposed,
    }


def _interference(layout: Layout, model: TrafficModel) -> float:
    """Share by which a deep pipeline is slower where several of them run through the same nodes.

    Their messages meet on the node's links at times of their own, and a stage in the middle waits for both neighbours: the
    share of such stages, times the other pipelines in a node, times `Calibration.interference`. An empirical term.
    """
    levels = model.topology.levels
    if layout.pp < 3 or len(levels) == 1 or layout.tp * layout.cp * layout.dp < levels[0].size:
        return 0.0
    pipelines = max(1.0, levels[0].size / (layout.tp * layout.cp))
    return model.calibration.interference * (pipelines - 1) * (layout.pp - 2) / layout.pp


def _interval(breakdown: dict[str, float], calibration: Calibration) -> Interval:
    """Parts of the step with their own bounds, added up: a step's parts follow each other."""
    total = Interval(0.0, 0.0, 0.0)
    for part, seconds in breakdown.items():
        low, high = 1 - calibration.spread, 1 + calibration.spread
        if part in COMMUNICATION:
            low, high = 1 / (1 + calibration.network_spread / 2), 1 + calibration.network_spread
        total = total + Interval(seconds, low * seconds, high * seconds)
    return total
