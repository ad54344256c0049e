"""What watches over the streams and gradients of a run. By default all of it is off: the run without it, bit for bit."""

from __future__ import annotations

import math
from dataclasses import dataclass

from laneway.core import InputError


@dataclass(frozen=True)
class ControlConfig:
    """Controls of streams and gradients; each is off until its field says otherwise."""

    norm_guard: float = 0.0
    """Scale a path whose gradient norm is more than so many times its own moving average down to it, every step; 0: off."""

    def problems(self, prefix: str = "control") -> list[InputError]:
        """Everything that is wrong with these fields, one error a field."""
        rules = [
            ("norm_guard", self.norm_guard, self.norm_guard == 0 or 1 < self.norm_guard < math.inf, "a number > 1, or 0 for off"),
        ]
        return [InputError(f"{prefix}.{name}", given, accepted) for name, given, fine, accepted in rules if not fine]
