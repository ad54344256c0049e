"""What to save of a training run, so that going on is exact: model, optimizer, plain extras and the random number generators.

Model and optimizer go through torch.distributed.checkpoint.state_dict: parameters have their plain names whatever wraps the
model (DDP, FSDP2, torch.compile, activation checkpointing), and the optimizer's state goes by those names, so that a
checkpoint can be loaded under another number of ranks or another wrapping.
"""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from laneway.checkpoint.store import CheckpointStore
from laneway.checkpoint.tree import PerRank


@dataclass(frozen=True)
class Restored:
    """What ``restore`` found besides model and optimizer.

    Args:
        step: optimizer step that was saved.
        extras: as given to ``capture``; equal on all ranks.
        per_rank: as this rank gave it to ``capture``; None where the checkpoint has none for this rank.
    """

    step: int
    extras: Any
    per_rank: Any


def capture(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, extras: Any = None, per_rank: Any = None
) -> dict[str, Any]:
    """The state to give to ``CheckpointStore.save``; collective where the model is sharded.

    Args:
        model: plain, or wrapped by DDP, FSDP2, torch.compile or activation checkpointing.
        optimizer: the model's optimizer, between two steps.
        extras: tensors and plain data that are equal on all ranks: data cursor, schedule, settings.
        per_rank: the same of this rank alone, as ``capture_rng()``.
    """
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    if optimizer is not None:
        state["optimizer"] = _optimizer_state(model, optimizer)
    return {**state, "extras": extras, "per_rank": PerRank(per_rank)}


def _optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state by parameter names. An optimizer that has made no step yet has none, and keeps none."""
    untouched = not optimizer.state
    state = get_optimizer_state_dict(model, optimizer)
    if untouched:
        # torch has made a step with zero gradients to have something to return; its count of 1 would make the real first step
        # a second one.
        optimizer.state.clear()
        state["state"] = {}
    return state


def restore(
    store: CheckpointStore, step: int | None, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> Restored:
    """Load a checkpoint of ``capture`` into model and optimizer, in place; every rank calls this.

    Args:
        store: where it is.
        step: which one; None for the newest good one.
        model: built and wrapped as it is to be trained; may be wrapped otherwise than when it was saved.
        optimizer: built over its parameters, or None to load the model alone. Its gradients are dropped.

    Raises:
        LanewayError: no good checkpoint, or it does not fit the model or the optimizer.
    """
    if optimizer is not None:
        optimizer.zero_grad(set_to_none=True)  # with gradients around, torch would not make the state that is to be filled
    state = capture(model)
    if optimizer is not None:
        filled = get_optimizer_state_dict(model, optimizer)
        # Groups may share one tensor (a learning rate), which must not be filled twice with different values.
        state["optimizer"] = {**filled, "param_groups": [copy.deepcopy(group) for group in filled["param_groups"]]}
    if step is None:
        step = store.load_latest(state)
    else:
        store.load(step, state)
    set_model_state_dict(model, state["model"])
    if optimizer is not None:
        # Not strict: the checkpoint may lack parameters that had had no gradient. What is missing otherwise, load has refused.
        options = StateDictOptions(strict=False)
        set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
    return Restored(step, state["extras"], state["per_rank"].value)


def capture_rng() -> dict[str, Any]:
    """State of this process's random number generators: Python, numpy, torch on the CPU and, where there is one, on the GPU."""
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """Undo of ``capture_rng``. The GPU's state is left alone where it was saved on, or is loaded on, a machine without one."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
