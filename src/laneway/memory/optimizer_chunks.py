"""An optimizer's step on some of its parameters: which optimizers that suits, and what becomes of the groups' options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from laneway.core import InputError, LanewayError


class Options:
    """The groups' options over the chunks of a step: each chunk sees those from before it, the last word is that of all."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self.groups = groups
        self.changed: list[dict[str, Any]] = [{} for _ in groups]
        self._current: list[int] = []

    def narrowed(self, piece: list[Tensor]) -> list[dict[str, Any]]:
        """The groups that have parameters in ``piece``, with those only."""
        wanted = {id(p) for p in piece}
        narrow = [(i, [p for p in group["params"] if id(p) in wanted]) for i, group in enumerate(self.groups)]
        self._current = [i for i, parameters in narrow if parameters]
        return [self.groups[i] | {"params": parameters} for i, parameters in narrow if parameters]

    def take(self, narrow: list[dict[str, Any]]) -> None:
        """Note what a chunk's step has changed."""
        for index, group in zip(self._current, narrow, strict=True):
            before, changed = self.groups[index], self.changed[index]
            for key, value in group.items():
                if key == "params" or (key in before and value is before[key]):
                    continue
                if key in changed and not _equal(changed[key], value):
                    raise LanewayError(
                        f"{key}: the optimizer computes this option from the parameters it sees, so it can't work in chunks"
                    )
                changed[key] = value

    def apply(self) -> None:
        """Give the groups what has changed."""
        for group, changed in zip(self.groups, self.changed, strict=True):
            group.update(changed)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    return bool(a == b)


def step_of(optimizer: Optimizer) -> Callable[..., Any]:
    """The class's step without its hooks; refused where chunks would change what it computes."""
    step = type(optimizer).step
    raw = getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
    own = str(getattr(raw, "__module__", "")).startswith("torch.optim.")
    if isinstance(optimizer, torch.optim.LBFGS) or not (own or getattr(optimizer, "updates_each_parameter_alone", False)):
        raise InputError(
            "optimizer",
            type(optimizer).__name__,
            "an optimizer of torch that updates every parameter by itself",
            "a class of one's own can say that it does: updates_each_parameter_alone = True",
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise InputError("optimizer", "differentiable=True", "an optimizer whose steps are not differentiated")
    replaced = optimizer.__dict__.get("step")
    if replaced is not None and not (
        hasattr(replaced, "_wrapped_by_lr_sched") and getattr(replaced, "__wrapped__", None) in (step, raw)
    ):
        raise InputError(
            "optimizer", f"step replaced by {replaced!r}", "its class's own step; wrap it after the state is streamed"
        )
    return raw
