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

import torch
from torch import Tensor, nn

from laneway.connections.agreement import SameDecision
from laneway.connections.path_gradients import PathGradients
from laneway.connections.paths import Path, paths_of
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
        device = self.gradients.device
        self.mean = torch.zeros(len(self.gradients.paths), device=device)
        self.seen = torch.zeros(len(self.gradients.paths), device=device)
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
        """Scale what leaps. The host reads one flag a path."""
        self.gradients.look()
        norms = self.gradients.norms()
        fine = norms.isfinite() & (norms > 0)
        over = fine & (self.seen >= self.warmup) & (norms > self.factor * self.mean)
        flags = torch.stack([over, ~norms.isfinite()])
        scale = torch.where(over, self.mean / norms, 1.0)
        self._average(norms, fine)
        flagged, poisoned = ([path for path, flag in enumerate(line) if flag] for line in flags.tolist())
        self.purified = len(flagged)
        self.agreement.put([step, *flagged])
        for path in flagged:
            for view in self.gradients.of(path):
                view.data.mul_(scale[path])
        factors = scale[flagged].tolist() if flagged else []
        for path, factor in [*zip(flagged, factors, strict=True), *((path, None) for path in poisoned)]:
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
        return {"names": [path.name for path in self.gradients.paths], "mean": self.mean.clone(), "seen": self.seen.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo of ``state_dict``.

        Raises:
            InputError: the state is of other paths.
        """
        check_names(state["names"], self.gradients.paths)
        self.mean.copy_(state["mean"])
        self.seen.copy_(state["seen"])

    def _average(self, norms: Tensor, fine: Tensor) -> None:
        weight = (1 / (self.seen + 1)).clamp_min(1 - self.decay)
        seen = torch.where(self.seen < self.warmup, norms, torch.minimum(norms, self.factor * self.mean))
        self.mean = torch.where(fine, self.mean + weight * (seen - self.mean), self.mean)
        self.seen += fine


def check_names(saved: Sequence[str], paths: Sequence[Path]) -> None:
    """Raise InputError where a saved state belongs to other paths."""
    names = [path.name for path in paths]
    if list(saved) != names:
        other = next((a for a, b in zip(saved, names, strict=False) if a != b), f"{len(saved)} paths")
        raise InputError("paths", other, f"the state of this model's {len(names)} paths")
