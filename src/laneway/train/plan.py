"""A written plan applied to a run: which fields of the configuration it sets, and what it must agree with."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING

from laneway.cluster.architecture import Architecture
from laneway.core import InputError
from laneway.models.gpt import GPTConfig
from laneway.train.config import TrainConfig
from laneway.train.control_config import ControlConfig

if TYPE_CHECKING:
    from laneway.strategy.strategy import Strategy


def architecture_of(model: GPTConfig, control: ControlConfig | None = None) -> Architecture:
    """What a plan needs to know of a model, with what its controls add to it."""
    features = control.schedule.features if control is not None and control.scheduler else 0
    return Architecture(
        layers=model.layers,
        hidden=model.dim,
        heads=model.heads,
        kv_heads=model.heads,
        ffn=model.hidden,
        vocab=model.vocab_size,
        gated=True,
        tied=True,
        streams=1 if model.residual == "residual" else model.streams,
        scheduler=min(features, model.dim),
    )


def apply_plan(plan: Strategy, config: TrainConfig) -> TrainConfig:
    """The configuration with the plan's batch, micro-batch, precision, recompute, layout and memory in place of its own.

    Raises:
        InputError: the plan was made for another model or length, or has degrees that the training loop doesn't apply.
    """
    ours, planned = architecture_of(config.model, config.control), plan.arch
    for name in (item.name for item in fields(Architecture)):
        if getattr(ours, name) != getattr(planned, name):
            hint = "plan for this run's model with `laneway plan --recipe NAME [--config FILE]`"
            raise InputError(
                "plan", f"{name}={getattr(planned, name)}", f"a plan for a model with {name}={getattr(ours, name)}", hint
            )
    if plan.seq_len != config.model.context:
        raise InputError("plan", f"seq_len={plan.seq_len}", f"a plan for model.context={config.model.context}")
    layout = plan.layout
    for name in ("tp", "pp", "cp", "ep"):
        if getattr(layout, name) > 1:
            hint = f"plan again with --{name} 1" if name != "ep" else None
            raise InputError(
                "plan", f"{name}={getattr(layout, name)}", "data-parallel plans: others need Strategy.wrap_model", hint
            )
    if layout.dp_shard > 1 and layout.dp_replicate > 1:
        raise InputError(
            "plan", f"dp_shard={layout.dp_shard} dp_replicate={layout.dp_replicate}", "all ranks sharded, or all replicas"
        )
    kind = "fsdp" if layout.dp_shard > 1 else "ddp" if layout.dp_replicate > 1 else "none"
    memory = replace(config.memory, optimizer_state="streamed") if plan.memory == "host" else config.memory
    return replace(
        config,
        batch_size=plan.global_batch,
        micro_batch_size=layout.micro_batch,
        precision=layout.precision,
        activation_checkpointing=layout.recompute == "full",
        parallel=kind,
        memory=memory,
    )


def check_world(plan: Strategy, world: int) -> None:
    """Raise InputError where a run has another number of processes than its plan."""
    if plan.world != world:
        hint = f"start {plan.world} with torchrun, or plan for {world} (Strategy.scaled_to({world}))"
        raise InputError("plan", f"{plan.world} ranks", f"a plan for the {world} processes of this run", hint)
