"""What watches over the streams and gradients of a run. By default all of it is off: the run without it, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from laneway.connections.purify import SCREENS
from laneway.core import InputError, choice, collect, positive_int


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
        return collect(checks)

    def _check_guard(self, name: str) -> None:
        if not (self.norm_guard == 0 or 1 < self.norm_guard < math.inf):
            raise InputError(name, self.norm_guard, "a number > 1, or 0 for off")
        if self.norm_guard and self.purify_every:
            raise InputError(name, self.norm_guard, "0 beside purify_every: one of them corrects gradients")
