"""Controls by name: ``build("curvature", model)`` puts one on a model and returns it as an extension of the loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from laneway.connections.constraint import CurvatureConstraint, Rule
from laneway.connections.control import StreamControl, attach, detach, require_sites
from laneway.connections.gates import ConstantStrength
from laneway.connections.schedule import FixedPriorities, Schedule
from laneway.connections.scheduler import ConnectionScheduler
from laneway.connections.tuning import AutoSettings, AutoStrength
from laneway.core import Extension, InputError, choice


class ConstantControl:
    """Every write times one number in (0, 1]: what the others must beat. An extension that has nothing to do in a step.

    Raises:
        InputError: a strength out of range, or a model without maps.
    """

    def __init__(self, model: nn.Module, strength: float = 0.8) -> None:
        self.model = model
        self.gates: list[StreamControl] = []
        self.gates += attach(model, lambda site, place: ConstantStrength(site.streams, strength).to(site.base.device))

    def remove(self) -> None:
        """Take it off the model."""
        detach(self.model, self.gates)

    def on_step_begin(self, step: int) -> None:
        """Nothing."""

    def on_backward_end(self, step: int) -> None:
        """Nothing."""

    def on_step_end(self, step: int, metrics: dict[str, Any]) -> None:
        """Nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Empty: the strength is a buffer of the model."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing."""


class PriorityControl(ConstantControl):
    """The same priorities of streams everywhere and always: what the scheduler must beat.

    Raises:
        InputError: shares that are no numbers > 0, one a stream, or a model without maps.
    """

    def __init__(self, model: nn.Module, shares: Sequence[float] = (0.4, 0.2, 0.2, 0.2), form: str = "scale") -> None:
        for site in require_sites(model):
            if len(shares) != site.streams:
                raise InputError("shares", list(shares), f"a number > 0 for each of {site.streams} streams")
        self.model = model
        self.gates = []
        self.gates += attach(model, lambda site, place: FixedPriorities(shares, form).to(site.base.device))


def _scheduler(**fixed: Any) -> Callable[..., Extension]:
    def make(model: nn.Module, **options: Any) -> Extension:
        return ConnectionScheduler(model, Schedule(**fixed, **options))

    return make


def _curvature(**rule: Any) -> Callable[..., Extension]:
    def make(model: nn.Module, strength: float = 0.3, **options: Any) -> Extension:
        return CurvatureConstraint(model, strength, rule=Rule(**rule), **options)

    return make


def _automatic(model: nn.Module, settings: AutoSettings | None = None, **options: Any) -> Extension:
    return CurvatureConstraint(model, AutoStrength(settings), **options)


CONTROLS: dict[str, Callable[..., Extension]] = {
    "constant": ConstantControl,
    "curvature": _curvature(),
    "curvature-exponential": _curvature(form="exponential"),
    "curvature-peers": _curvature(reference="peers"),
    "curvature-res": _curvature(res=True),
    "curvature-auto": _automatic,
    "priorities": PriorityControl,
    "scheduler": _scheduler(),
    "scheduler-logits": _scheduler(form="logits"),
}


def build(name: str, model: nn.Module, **options: Any) -> Extension:
    """Put a control on a model; the loop calls what is returned.

    Args:
        name: a key of ``CONTROLS``. constant: one ``strength`` for all writes. curvature: ``CurvatureConstraint`` with its
            options; -exponential, -peers and -res are its other rules; -auto chooses λ itself (``settings``). priorities: the
            same ``shares`` of streams always. scheduler: ``ConnectionScheduler`` with the fields of ``Schedule``; -logits has its
            other form; both add parameters, so they come before the optimizer.
        model: on the device where it is trained.
        options: those of the control.

    Raises:
        InputError: an unknown name, an option out of range, or a model without maps.
    """
    return CONTROLS[choice("name", name, CONTROLS)](model, **options)
