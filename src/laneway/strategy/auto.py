"""``auto_config``: a model's size and a cluster in, the fastest plan that fits out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from laneway.cluster.architecture import Architecture
from laneway.cluster.costs import Calibration, estimate_step, parameters_of
from laneway.cluster.layout import Layout, Precision
from laneway.cluster.topology import Topology
from laneway.core import InputError, LanewayError, choice
from laneway.strategy.batch import usual_batch
from laneway.strategy.checkpoints import DEVICE_HOURS, CheckpointPolicy, checkpoint_policy
from laneway.strategy.checks import check_architecture, check_device, count
from laneway.strategy.explain import Alternative, Reason, alternatives, reasons
from laneway.strategy.files import from_plain
from laneway.strategy.levels import collectives
from laneway.strategy.model_size import parse_model_size
from laneway.strategy.offload import offload_seconds
from laneway.strategy.refuse import refusal, scaled_topology
from laneway.strategy.search import Candidate, held_by, moved_to_host, search, usable_bytes
from laneway.strategy.shapes import architecture_for
from laneway.strategy.space import Job
from laneway.strategy.strategy import Strategy

FIXABLE = ("tp", "cp", "pp", "ep", "dp_shard", "micro_batch")
CLOSE_ENOUGH = 0.1


def auto_config(
    model_size: float | str | None = None,
    hardware_topology: str | Topology | Mapping[str, Any] | Path | None = None,
    *,
    arch: Architecture | Mapping[str, Any] | None = None,
    seq_len: int = 2048,
    global_batch: int | None = None,
    precision: str = "bf16",
    streams: int | None = None,
    fixed: Mapping[str, int] | None = None,
    calibration: Calibration | None = None,
) -> Strategy:
    """Plan the training of a model on a cluster.

    Args:
        model_size: parameters: ``175e9``, ``"175B"``; may be left out where ``arch`` is given.
        hardware_topology: ``"8xH100_32nodes"``, a dictionary, a TOML file or a ``Topology``; None detects the running cluster.
        arch: the model's shape; None takes the published one of this size, or one in proportion.
        seq_len: tokens of a sequence.
        global_batch: sequences of an optimizer step; None takes what models of this size usually have, in a number that divides.
        precision: of matrix products: bf16, fp8 or fp32.
        streams: residual streams of hyper-connections; None: the architecture's own (1 is the plain residual).
        fixed: degrees that are given, by name (``{"tp": 8}``): tp, cp, pp, ep, dp_shard, micro_batch. The others are searched.
        calibration: constants measured on the cluster at hand; None takes the published ones.

    Returns:
        The plan with the least predicted step time among those that fit; the same for the same arguments, always.

    Raises:
        InputError: a field that is no such thing, or a batch that no layout divides.
        DoesNotFitError: no layout fits; says how many devices, or how much memory each, would do.
    """
    topology = _topology(hardware_topology)
    shape, source, size = _shape(model_size, arch, streams)
    count("seq_len", seq_len)
    choice("precision", precision, get_args(Precision))
    check_device(topology.device, precision, "topology.device")
    if fixed is not None and not isinstance(fixed, Mapping):
        raise InputError("fixed", fixed, f"degrees by name: {', '.join(FIXABLE)}")
    held = tuple((choice("fixed", name, FIXABLE), count(f"fixed.{name}", value)) for name, value in (fixed or {}).items())
    job = Job(shape, topology, 0, seq_len, precision, held)  # pyrefly: ignore[bad-argument-type]  (checked by choice)
    batch = usual_batch(job, size) if global_batch is None else count("global_batch", global_batch)
    return _planned(replace(job, global_batch=batch), size, source, calibration)


def _planned(job: Job, size: float, source: str, calibration: Calibration | None) -> Strategy:
    found = search(job, calibration)
    if not found.candidates:
        raise refusal(job, found, calibration)
    best = found.candidates[0]
    told = reasons(found.candidates), alternatives(found.candidates)
    return build(job, best, size, source, *told, calibration or Calibration())


def build(
    job: Job,
    best: Candidate,
    size: float,
    source: str,
    why: list[Reason],
    others: list[Alternative],
    calibration: Calibration,
) -> Strategy:
    """The strategy of a candidate: with its collectives, its checkpoints and the reasons for both."""
    reduced = collectives(job, best.layout, calibration)
    memory = best.estimate.memory
    held = held_by(job, best.layout, calibration)
    saved = checkpoint_policy(
        job.topology.device, job.topology.world, held.parameters + held.optimizer, best.estimate.seconds.value
    )
    room = f"{memory.total / 1e9:.3g} GB of {usable_bytes(job) / 1e9:.3g} GB usable"
    why = [
        *why,
        *(Reason(f"{each.axis} {each.op}", each.algorithm, each.told, "cost model") for each in reduced),
        Reason("memory", room, f"{memory.activations / 1e9:.3g} GB of it activations", "cost model"),
        _checkpoint_reason(saved),
        Reason("streams", str(job.arch.streams), "as asked", "the architecture"),
        Reason("precision", job.precision, "as asked", "the call"),
    ]
    return Strategy(
        model_size=size,
        arch=job.arch,
        arch_source=source,
        topology=job.topology,
        seq_len=job.seq_len,
        global_batch=job.global_batch,
        layout=best.layout,
        memory="host" if best.offload else "device",
        collectives=tuple(reduced),
        checkpoint=saved,
        predicted=best.estimate,
        reasons=tuple(why),
        alternatives=tuple(others),
        calibration=calibration,
    )


def scaled(plan: Strategy, world: int) -> Strategy:
    """The plan on another number of devices (see ``Strategy.scaled_to``)."""
    topology = scaled_topology(plan.topology, count("world", world))
    before = plan.layout
    inner = before.tp * before.cp * before.pp
    if world % inner:
        raise InputError("world", world, f"a multiple of tp × cp × pp = {inner}")
    data = world // inner
    share, left = divmod(plan.global_batch, data)
    if left or not share:
        accepted = f"{inner} (tp × cp × pp) times a number that divides global_batch = {plan.global_batch}"
        raise InputError("world", world, accepted, "or plan again with another global_batch")
    shard = before.dp_shard if data % before.dp_shard == 0 else data
    if (shard * before.cp) % before.ep:
        raise InputError("world", world, f"devices that leave a multiple of ep = {before.ep} ranks to shard over")
    micro_batch = math.gcd(share, before.micro_batch)
    chunks = before.chunks if share // micro_batch % before.pp == 0 else 1  # an interleaved schedule goes by whole rounds
    layout = replace(before, dp_shard=shard, dp_replicate=data // shard, micro_batch=micro_batch, chunks=chunks)
    job = Job(plan.arch, topology, plan.global_batch, plan.seq_len, layout.precision)
    found = _candidate(job, layout, plan.memory, plan.calibration)
    return build(job, found, plan.model_size, plan.arch_source, [], [], plan.calibration)


def _candidate(job: Job, layout: Layout, memory: str, calibration: Calibration) -> Candidate:
    estimate = estimate_step(
        job.arch, layout, job.topology, global_batch=job.global_batch, seq_len=job.seq_len, calibration=calibration
    )
    if memory == "host":
        seconds = offload_seconds(job.topology.device, estimate.memory.optimizer)
        if seconds is None:
            raise LanewayError("does not fit: the host can't hold the optimizer's state of this many devices")
        estimate = moved_to_host(job, estimate, seconds)
    if estimate.memory.total > usable_bytes(job):
        needed, room = estimate.memory.total / 1e9, usable_bytes(job) / 1e9
        raise LanewayError(f"does not fit: {needed:.1f} GB on each device of which {room:.1f} GB are usable; plan again")
    return Candidate(layout, memory == "host", estimate)


def _topology(given: object) -> Topology:
    if isinstance(given, Topology):
        return given
    if given is None:
        from laneway.cluster.detect import detect_topology

        return detect_topology()
    return Topology.parse(given)  # pyrefly: ignore[bad-argument-type]


def _shape(model_size: object, arch: object, streams: int | None) -> tuple[Architecture, str, float]:
    """Architecture, its source, and the number of parameters that was asked for."""
    wide = 1 if streams is None else count("streams", streams)
    if arch is None:
        if model_size is None:
            raise InputError("model_size", None, "a number of parameters, or arch")
        size = parse_model_size(model_size)
        shape, source = architecture_for(size, wide)
        return shape, source, size
    shape = arch if isinstance(arch, Architecture) else from_plain(Architecture, arch, "arch")
    check_architecture(shape, "arch")
    shape = shape if streams is None else replace(shape, streams=wide)
    actual = parameters_of(replace(shape, streams=1))
    if model_size is not None and abs(parse_model_size(model_size) / actual - 1) > CLOSE_ENOUGH:
        raise InputError("model_size", model_size, f"about {actual:.4g}, the size of arch", "or leave it out")
    return shape, "as given", float(actual)


def _checkpoint_reason(policy: CheckpointPolicy) -> Reason:
    number = f"an interruption every {policy.mtbf_s / 3600:.3g} h, {policy.blocking_s:.3g} s to copy"
    return Reason("checkpoint every", f"{policy.interval_steps} steps", number, f"Young 1974; {DEVICE_HOURS.source}")
