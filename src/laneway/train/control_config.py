"""What watches over the streams and gradients of a run. By default all of it is off: the run without it, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from laneway.connections.purify import SCREENS
from laneway.connections.schedule import Schedule
from laneway.core import InputError, choice, collect, positive_int
from laneway.models.gpt import GPTConfig


@dataclass(frozen=True)
class ControlConfig:
    """Controls of streams and gradients; each is off until its field says otherwise."""

    purify_every: int = 0
    """Steps between checks of all paths' gradients, whose outliers are moved back to what is usual; 4 to 8 are; 0: off."""
    purify_screen: str = "now"
    """now (the norms of all paths are looked at in every step) | late (one step later, without a wait) | off"""
    purify_sample: int = 1024
    """Gradient values of each parameter that a check looks at."""
    norm_guard: float = 0.0
    """Scale a path whose gradient norm is more than so many times its own moving average down to it, every step; 0: off."""
    scheduler: bool = False
    """Priorities of the streams at every site, token by token, from their contents and their recent use (schedule.py)."""
    scheduler_temperature: float = 1.0
    """> 0: the lower, the more one stream is preferred."""
    scheduler_floor: float = 0.05
    """Smallest share of each stream in the priorities, > 0 and < 1 / streams."""
    scheduler_form: str = "scale"
    """scale | logits: how priorities change a map."""
    scheduler_demand: float = 0.5
    """How far shares of recent use (gradient × activation) set the priorities, from 0 to below 1."""
    scheduler_damping: float = 0.5
    """How far writes to streams that are too alike are held back, ≥ 0; 0: not at all."""
    scheduler_keep_total: bool = True
    """Whether a token's writes add up to what they would without the scheduler."""
    scheduler_every: int = 8
    """Steps between two measurements of use and likeness."""
    verify_ranks: bool = False
    """Compare a hash of each decision over the ranks; the run stops where two differ."""

    def problems(self, prefix: str = "control") -> list[InputError]:
        """Everything that is wrong with these fields, one error a field."""
        checks: list[Callable[[], object]] = [
            lambda: positive_int(f"{prefix}.purify_every", self.purify_every, 0),
            lambda: choice(f"{prefix}.purify_screen", self.purify_screen, SCREENS),
            lambda: positive_int(f"{prefix}.purify_sample", self.purify_sample, 64),
            lambda: self._check_guard(f"{prefix}.norm_guard"),
        ]
        return [*collect(checks), *self.schedule.problems((), (), f"{prefix}.scheduler_")]

    @property
    def schedule(self) -> Schedule:
        """The scheduler's fields."""
        return Schedule(
            temperature=self.scheduler_temperature,
            floor=self.scheduler_floor,
            form=self.scheduler_form,
            demand=self.scheduler_demand,
            damping=self.scheduler_damping,
            keep_total=self.scheduler_keep_total,
            every=self.scheduler_every,
        )

    def check_model(self, model: GPTConfig, prefix: str = "control") -> None:
        """Raise InputError where the scheduler can't work on this model."""
        if not self.scheduler:
            return
        if model.residual == "residual" or model.streams == 1:
            raise InputError(f"{prefix}.scheduler", True, "false for one stream: model.residual with maps and model.streams ≥ 2")
        for problem in self.schedule.problems((model.streams,), (model.dim,), f"{prefix}.scheduler_"):
            raise problem

    def _check_guard(self, name: str) -> None:
        if not (self.norm_guard == 0 or 1 < self.norm_guard < math.inf):
            raise InputError(name, self.norm_guard, "a number > 1, or 0 for off")
        if self.norm_guard and self.purify_every:
            raise InputError(name, self.norm_guard, "0 beside purify_every: one of them corrects gradients")
