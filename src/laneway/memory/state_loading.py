"""Loading an optimizer's state one parameter at a time, where torch would put all of it on the device first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from laneway.memory.lowbit_moments import is_encoded


class StateLoading:
    """The hooks before and after ``Optimizer.load_state_dict``.

    Args:
        forget: called when the new state is known to fit the optimizer, before any of it is taken.
        check: called with the state dict before anything is taken; may raise.
        take: called for each parameter with its tensors, of the dtype and on the device that torch would give them; may
            put them, or others, into the optimizer's state.
    """

    def __init__(
        self,
        forget: Callable[[], None],
        take: Callable[[Tensor, dict[str, Tensor]], None],
        check: Callable[[dict[str, Any]], None] = lambda state_dict: None,
    ) -> None:
        self.forget, self.take, self.check = forget, take, check
        self._given: dict[str, Any] = {}

    def before(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """What torch is to load itself: everything but the tensors that aren't scalars."""
        self.check(state_dict)
        self._given = state_dict
        state = {
            key: {name: v for name, v in entry.items() if not _large(v)} if isinstance(entry, dict) else entry
            for key, entry in state_dict["state"].items()
        }
        return state_dict | {"state": state}

    def after(self, optimizer: Optimizer) -> None:
        """Take the rest."""
        given, self._given = self._given, {}
        self.forget()
        saved = [key for group in given["param_groups"] for key in group["params"]]
        own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for key, parameter in zip(saved, own, strict=True):
            entry = given["state"].get(key)
            if not isinstance(entry, dict):
                continue
            large = {
                name: v.to(parameter.device)  # codes and scales, whatever dtype the parameter has
                if is_encoded(name)
                else Optimizer._process_value_according_to_param_policy(parameter, v, key, given["param_groups"], name)
                for name, v in entry.items()
                if _large(v)
            }
            self.take(parameter, large)
            state = optimizer.state[parameter]
            saved_order = {name: state[name] for name in entry if name in state}
            optimizer.state[parameter] = saved_order | state


def _large(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.numel() > 0 and value.layout is torch.strided
