"""``PathNormGuard``: the norm of every path against its own moving average, and nothing else. The cheapest way to hold a path.

After each backward pass, with n the 2-norm of a path's gradient, m its moving average and e the ``factor``:

    n > e·m     the path's gradient is multiplied by m / n; otherwise nothing is touched
    m ← d·m + (1 − d)·min(n, e·m)     (the plain mean over the first 1 / (1 − d) steps)

A leap by L that lasts is let through after about ln(L) / ((1 − d)(e − 1)) steps, as a path that has grown must be. A path whose
norm is not finite is reported and left to the loop, which skips the step; it moves no average.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from laneway.connections.agreement import SameDecision
from laneway.connections.path_gradients import PathGradients
from laneway.connections.paths import Path, paths_of
from laneway.connections.transport import Flags, Numbers
from laneway.core import InputError, Statistics, positive_int, real

Tell = Callable[..., None]
"""Called as ``tell(kind, path=…, score=…, correction=…, …)`` for what a person should know."""


class PathNormGuard:
    """Scales down paths whose gradient norm leaps over their own moving average. An ``Extension`` of the training loop.

    It makes one small collective a step where gradients are sharded (FSDP2), none elsewhere, and decides alike on all ranks.

    Args:
        model: whose paths are watched, already wrapped (DDP, FSDP2); or a list of paths.
        factor: e, the leap that is not accepted; > 1.
        decay: d of the moving average, 0 to below 1.
        warmup: steps in which averages are gathered and nothing is changed, ≥ 1.
        tell: told of what was done, see ``Tell``; the correction is the factor on the path's norm (None: not finite, left).
        verify: compare a hash of each decision over the ranks, one step late, where a loop shares statistics.

    Raises:
        InputError: a value out of range, or a model without paths.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[Path],
        factor: float = math.e,
        *,
        decay: float = 0.98,
        warmup: int = 20,
        tell: Tell | None = None,
        verify: bool = False,
    ) -> None:
        self.factor = real("factor", factor, lambda e: e > 1, "a number > 1")
        self.decay = real("decay", decay, lambda d: 0 <= d < 1, "a number from 0 to below 1")
        self.warmup = positive_int("warmup", warmup)
        self.gradients = PathGradients(paths_of(model) if isinstance(model, nn.Module) else model)
        self.tell, self.agreement = tell, SameDecision("guard", verify)
        self.mean = np.zeros(len(self.gradients.paths))
        self.seen = np.zeros(len(self.gradients.paths))
        self.purified = 0
        self._told: list[dict[str, Any]] = []

    def share(self, statistics: Statistics) -> None:
        """Hashes of decisions go with what the loop reduces anyway."""
        self.agreement.share(statistics)

    def on_step_begin(self, step: int) -> None:
        """Compare the last decision over the ranks, where that is on."""
        self.agreement.compare(step)

    @torch.no_grad()
    def on_backward_end(self, step: int) -> None:
        """Scale what leaps. The host waits for a number a path."""
        self.gradients.look()
        norms = self.gradients.norms().numpy()
        finite = np.isfinite(norms)
        over = finite & (self.seen >= self.warmup) & (norms > self.factor * self.mean)
        flagged, poisoned = over.nonzero()[0].tolist(), (~finite).nonzero()[0].tolist()
        factors = {path: float(self.mean[path] / norms[path]) for path in flagged}
        self._average(norms, finite & (norms > 0))
        for path, factor in factors.items():
            for view in self.gradients.of(path):
                view.data.mul_(factor)
        self.gradients.release()
        self.purified = len(flagged)
        self.agreement.put([step, *flagged])
        for path, factor in [*factors.items(), *((path, None) for path in poisoned)]:
            score = None if factor is None else 1 / factor
            self._told.append({"path": self.gradients.paths[path].name, "score": score, "correction": factor})

    def on_step_end(self, step: int, metrics: dict[str, Any]) -> None:
        """Adds ``purified_paths``, the number of paths that were scaled in this step."""
        metrics["purified_paths"] = self.purified
        for fields in self._told:
            if self.tell is not None:
                self.tell("purify", **fields)
        self._told = []

    def state_dict(self) -> dict[str, Any]:
        """The averages, by path."""
        kept = {"mean": self.mean, "seen": self.seen}
        return {"names": [path.name for path in self.gradients.paths], **{k: torch.tensor(v) for k, v in kept.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo of ``state_dict``.

        Raises:
            InputError: the state is of other paths.
        """
        check_names(state["names"], self.gradients.paths)
        self.mean[:], self.seen[:] = (state[name].cpu().numpy() for name in ("mean", "seen"))

    def _average(self, norms: Numbers, fine: Flags) -> None:
        weight = np.maximum(1 / (self.seen + 1), 1 - self.decay)
        kept = np.where(self.seen < self.warmup, norms, np.minimum(norms, self.factor * self.mean))
        self.mean = np.where(fine, self.mean + weight * (kept - self.mean), self.mean)
        self.seen += fine


def check_names(saved: Sequence[str], paths: Sequence[Path]) -> None:
    """Raise InputError where a saved state belongs to other paths."""
    names = [path.name for path in paths]
    if list(saved) != names:
        other = next((a for a, b in zip(saved, names, strict=False) if a != b), f"{len(saved)} paths")
        raise InputError("paths", other, f"the state of this model's {len(names)} paths")
