"""A plan in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from laneway.strategy.strategy import Strategy

GB = 1e9


def explained(plan: Strategy) -> str:
    """The plan, its prediction, each choice with number and source, and the alternatives."""
    return "\n".join([*headline(plan), "", *prediction(plan), "", *choices(plan), "", *others(plan)])


def headline(plan: Strategy) -> list[str]:
    """What is planned."""
    arch = plan.arch
    streams = f", {arch.streams} streams" if arch.streams > 1 else ""
    shape = f"{arch.layers} layers × {arch.hidden}, {arch.heads} heads{streams} ({plan.arch_source})"
    return [
        f"{plan.model_size:.4g} parameters on {plan.world} × {plan.topology.device.name}",
        f"  model     {shape}",
        f"  batch     {plan.global_batch} sequences of {plan.seq_len} tokens",
        f"  layout    {layout_line(plan)}",
    ]


def layout_line(plan: Strategy) -> str:
    """The degrees and dials."""
    it = plan.layout
    text = f"tp={it.tp} cp={it.cp} pp={it.pp} dp_shard={it.dp_shard} dp_replicate={it.dp_replicate} ep={it.ep}"
    text += f" micro_batch={it.micro_batch} recompute={it.recompute} precision={it.precision}"
    text += f" zero={it.zero} chunks={it.chunks}" + (" sequence_parallel" if it.sequence_parallel else "")
    return f"{text} optimizer={plan.memory}"


def prediction(plan: Strategy) -> list[str]:
    """Time, memory, traffic, energy."""
    it = plan.predicted
    parts = ", ".join(f"{name} {seconds:.3g}" for name, seconds in it.breakdown.items() if seconds > 0)
    memory = it.memory
    held = (
        f"parameters {memory.parameters / GB:.3g}, gradients {memory.gradients / GB:.3g}, optimizer {memory.optimizer / GB:.3g}"
    )
    traffic = ", ".join(f"{level} {nbytes / GB:.3g}" for level, nbytes in it.bytes_per_level.items())
    return [
        f"predicted step  {it.seconds.value:.3g} s ({it.seconds.low:.3g} … {it.seconds.high:.3g}), MFU {it.mfu:.1%}",
        f"  seconds       {parts}",
        f"  exposed       {it.exposed_communication:.3g} s of communication",
        f"  memory        {memory.total / GB:.3g} GB a device: {held}, activations {memory.activations / GB:.3g}",
        f"  sent          GB a device and step: {traffic or 'none'}",
        f"  energy        {it.kwh_per_token:.3g} kWh/token",
    ]


def choices(plan: Strategy) -> list[str]:
    """One line a choice: value, number, source."""
    width = max((len(reason.choice) for reason in plan.reasons), default=0)
    value = max((len(reason.value) for reason in plan.reasons), default=0)
    lines = [f"  {r.choice:<{width}}  {r.value:<{value}}  {r.number}  [{r.source}]" for r in plan.reasons]
    return ["why", *lines]


def others(plan: Strategy) -> list[str]:
    """The plans that were not taken."""
    lines = [
        f"  {a.slower:+7.1%}  {a.seconds:.3g} s  {a.bytes_per_device / GB:.3g} GB  {a.layout}: {a.reason}"
        for a in plan.alternatives
    ]
    return ["not taken (slower by, step, memory)", *(lines or ["  no other plan fits"])]
