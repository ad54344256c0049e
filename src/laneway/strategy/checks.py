"""What a plan must be, whoever wrote it: sizes above 0, degrees that divide, finite numbers, states that fit the device."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from laneway.cluster.architecture import Architecture
from laneway.cluster.estimate import Estimate
from laneway.cluster.layout import Layout
from laneway.cluster.topology import Device
from laneway.core import InputError, choice, positive_int
from laneway.strategy.search import held_by, usable_bytes
from laneway.strategy.space import Job, splits

if TYPE_CHECKING:
    from laneway.strategy.strategy import Strategy

__all__ = ["check_architecture", "check_device", "check_plan", "count"]

DEGREES = ("tp", "cp", "dp_shard", "dp_replicate", "pp", "ep", "micro_batch", "chunks")
LARGEST = 10**15


def check_architecture(arch: Architecture, field: str) -> None:
    """Raise InputError for a shape that no model has."""
    for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "streams"):
        count(f"{field}.{name}", getattr(arch, name))
    for name in ("experts", "experts_per_token", "scheduler"):
        count(f"{field}.{name}", getattr(arch, name), 0)
    if arch.hidden % arch.heads:
        raise InputError(f"{field}.heads", arch.heads, f"a divisor of hidden = {arch.hidden}")
    if arch.heads % arch.kv_heads:
        raise InputError(f"{field}.kv_heads", arch.kv_heads, f"a divisor of heads = {arch.heads}")
    if arch.scheduler > arch.hidden:
        raise InputError(f"{field}.scheduler", arch.scheduler, f"an integer from 0 to hidden = {arch.hidden}")
    if not min(1, arch.experts) <= arch.experts_per_token <= arch.experts:
        accepted = f"1 to experts = {arch.experts}" if arch.experts else "0 without experts"
        raise InputError(f"{field}.experts_per_token", arch.experts_per_token, accepted)


def check_device(device: Device, precision: str, field: str) -> None:
    """Raise InputError for numbers that no device has, or a precision that it lacks and that no wider one stands in for."""
    for name, flops in device.flops.items():
        _above(f"{field}.flops.{name}", flops)
    for name in ("memory_bytes", "memory_bandwidth"):
        _above(f"{field}.{name}", getattr(device, name))
    if not device.flops:
        raise InputError(f"{field}.flops", device.flops, "FLOP/s of at least one precision")
    if precision == "fp8" and "fp8" not in device.flops:
        raise InputError("precision", precision, f"bf16 or fp32: {device.name} has no fp8 products")


def check_plan(plan: Strategy, field: str) -> None:
    """Raise InputError, by its dotted name, for what can't be in a plan."""
    check_architecture(plan.arch, f"{field}.arch")
    check_device(plan.topology.device, plan.layout.precision, f"{field}.topology.device")
    for name in ("seq_len", "global_batch"):
        count(f"{field}.{name}", getattr(plan, name))
    choice(f"{field}.memory", plan.memory, ("device", "host"))
    _above(f"{field}.model_size", plan.model_size)
    for name in ("topology", "collectives", "checkpoint", "predicted", "alternatives"):
        for where, value in _numbers(getattr(plan, name), f"{field}.{name}"):
            if not 0 <= value < math.inf:
                raise InputError(where, value, "a number ≥ 0")
    _check_seconds(plan.predicted, f"{field}.predicted")
    _check_layout(plan, plan.layout, f"{field}.layout")
    _check_room(plan, f"{field}.layout")


def _check_layout(plan: Strategy, layout: Layout, field: str) -> None:
    for name in DEGREES:
        count(f"{field}.{name}", getattr(layout, name))
    for name, accepted in (("zero", (1, 2, 3)), ("grad_bytes", (2, 4))):
        if getattr(layout, name) not in accepted:
            raise InputError(f"{field}.{name}", getattr(layout, name), " or ".join(map(str, accepted)))
    if layout.world != plan.topology.world:
        raise InputError(field, layout.world, f"a layout of the topology's {plan.topology.world} devices")
    if not splits(plan.arch, layout.tp):
        raise InputError(f"{field}.tp", layout.tp, "a divisor of the model's heads, kv_heads, ffn and vocab")
    if plan.arch.layers % (layout.pp * layout.chunks):
        raise InputError(f"{field}.pp", layout.pp, f"stages (pp × chunks) that divide {plan.arch.layers} layers")
    if (layout.dp_shard * layout.cp) % layout.ep or max(1, plan.arch.experts) % layout.ep:
        raise InputError(f"{field}.ep", layout.ep, f"a divisor of {plan.arch.experts} experts and of dp_shard × cp")
    each = layout.dp * layout.micro_batch
    if plan.global_batch % each:
        raise InputError(f"{field}.micro_batch", layout.micro_batch, f"dp × micro_batch that divides the batch, not {each}")


def _check_seconds(predicted: Estimate, field: str) -> None:
    seconds, parts = predicted.seconds, sum(predicted.breakdown.values())
    if not math.isclose(parts, seconds.value, rel_tol=1e-6):
        raise InputError(f"{field}.seconds.value", seconds.value, f"what the parts of the breakdown add up to, {parts:.6g}")
    if not seconds.low <= seconds.value <= seconds.high or not seconds.value:
        raise InputError(f"{field}.seconds", [seconds.low, seconds.value, seconds.high], "low ≤ value ≤ high, above 0")


def _check_room(plan: Strategy, field: str) -> None:
    job = Job(plan.arch, plan.topology, plan.global_batch, plan.seq_len, plan.layout.precision)
    held, room = held_by(job, plan.layout, plan.calibration), usable_bytes(job)
    needed = held.total - (held.optimizer if plan.memory == "host" else 0.0)
    if needed > room:
        accepted = f"a layout that fits {room / 1e9:.3g} usable GB of each device; this one needs {needed / 1e9:.3g} GB"
        raise InputError(field, f"tp={plan.layout.tp} pp={plan.layout.pp} dp_shard={plan.layout.dp_shard}", accepted)


def count(field: str, given: object, least: int = 1) -> int:
    """An integer from ``least`` to `LARGEST`; raises InputError."""
    value = positive_int(field, given, least)
    if value > LARGEST:
        raise InputError(field, given, f"an integer from {least} to {LARGEST:g}")
    return value


def _above(field: str, given: float) -> None:
    if not 0 < given < math.inf:
        raise InputError(field, given, "a number > 0")


def _numbers(value: Any, field: str) -> Iterator[tuple[str, float]]:
    """All numbers in nested dataclasses, dictionaries and tuples, with their names."""
    if dataclasses.is_dataclass(value):
        for item in dataclasses.fields(value):
            yield from _numbers(getattr(value, item.name), f"{field}.{item.name}")
    elif isinstance(value, dict):
        for name, part in value.items():
            yield from _numbers(part, f"{field}.{name}")
    elif isinstance(value, tuple):
        for at, part in enumerate(value):
            yield from _numbers(part, f"{field}[{at}]")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield field, value
