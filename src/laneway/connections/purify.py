"""``GradientPurifier``: finds paths whose gradients have gone astray, and moves only those back to what is usual for them.

After a backward pass that is looked at, on a bounded sample of every path's gradient:

    1. the distribution of ln|g|, the barycentre of its peers, its own past, a score (formulas: ``contamination``)
    2. for each path with a score ≥ 1, and for no other:
           ln|g| ← ln|g| − strength · max(0, q − r − ln 4)     at the level of |g| in the path's quantiles q; r: the expected ones
           |g|   ← min(|g|, largest magnitude the path has had lately)
           g     ← g · min(1, N / |g|₂)       N: the 0.9-quantile of the path's own last norms

Signs stay, and no value grows. Without an outlier no gradient is written to. Every ``every``-th step is looked at; with the
screen so is any step in which the norm of a path leaps, so that a fault is met when it begins. A path with a NaN or an infinite
value is no one's peer, is reported, and is left to the loop, which skips the step. What the paths of a model are: ``paths_of``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from laneway.connections.agreement import SameDecision
from laneway.connections.contamination import History, Kinds, Reading, Settings, Verdict, judge, suspicious
from laneway.connections.guard import Tell, check_names
from laneway.connections.path_gradients import PathGradients
from laneway.connections.paths import Path, paths_of
from laneway.connections.readings import read
from laneway.connections.transport import Flags, Numbers, move_down
from laneway.core import Statistics, choice, positive_int, real

SCREENS = ("now", "late", "off")
SQUARES = "purify/squares"
YOUNG_MARGIN = math.log(16)
TOLERANCE = math.log(4)  # quantiles within this factor of what is expected stay where they are


class GradientPurifier:
    """Repairs contaminated gradients path by path. An ``Extension`` of the training loop.

    Decides alike on all ranks: gradients are equal there (DDP), or counts and squares are summed over the shards first (FSDP2),
    which takes two small collectives in a step that is looked at, and with ``screen="now"`` one in any other.

    Args:
        model: whose gradients are watched, already wrapped (DDP, FSDP2); or a list of paths.
        every: steps between checks, ≥ 1; 4 to 8 are usual.
        sample: values of each parameter of a path that a check looks at, ≥ 64.
        screen: ``now``: the norms of all paths are looked at in every step, and the host waits for them; ``late``: in the step
            after, without a wait and, in a run, without a collective; ``off``: only checks.
        strength: how much of the way outliers are moved, above 0 to 1.
        floor: least distance of an outlier, in nats: above 0.
        zeta: deviations of the peers that an outlier must exceed, above 0.
        release: nats by which the past of a contaminated path follows it at each check; 0: a fault is never taken for usual.
        tell: told of what was done: ``tell("purify", path=…, score=…, correction=…, in_a_row=…)``, the correction being the
            factor on the path's norm (None: not finite, left as it is). Of a path that is contaminated again and again, at the
            1st, 10th, 100th, … check.
        verify: compare a hash of each decision over the ranks, one step late, where a loop shares statistics.

    Raises:
        InputError: a value out of range, or a model without paths.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[Path],
        every: int = 6,
        *,
        sample: int = 1024,
        screen: str = "now",
        strength: float = 0.9,
        floor: float = math.log(32),
        zeta: float = 3.5,
        release: float = 0.01,
        tell: Tell | None = None,
        verify: bool = False,
    ) -> None:
        self.strength = real("strength", strength, lambda s: 0 < s <= 1, "a number above 0, to 1")
        for name, value in (("floor", floor), ("zeta", zeta)):
            real(name, value, lambda given: given > 0, "a number > 0")
        real("release", release, lambda nats: nats >= 0, "a number ≥ 0")
        self.every, self.sample = positive_int("every", every), positive_int("sample", sample, 64)
        self.screen, self.tell = choice("screen", screen, SCREENS), tell
        self.settings = Settings(floor, floor + YOUNG_MARGIN, zeta, release)
        self.gradients = PathGradients(paths_of(model) if isinstance(model, nn.Module) else model)
        self.paths = self.gradients.paths
        kinds: dict[str, list[int]] = {}
        for index, path in enumerate(self.paths):
            kinds.setdefault(path.kind, []).append(index)
        self.kinds = Kinds(list(kinds.values()))
        self.history, self.agreement = History(len(self.paths)), SameDecision("purify", verify)
        self.statistics: Statistics | None = None
        self.checks = 0
        self.flagged: list[int] = []
        self.held: dict[int, float] = {}  # contaminated paths of this step: what their past may take their norm for
        self.in_a_row = [0] * len(self.paths)
        self._alarm = False
        self._squares: Tensor | None = None  # of the step before, for the late screen
        self._told: list[dict[str, Any]] = []

    def share(self, statistics: Statistics) -> None:
        """Squares of sharded gradients, for the late screen, and hashes of decisions go with what the loop reduces anyway."""
        self.agreement.share(statistics)
        if self.screen == "late" and self.gradients.sharded:
            self.statistics = statistics
            statistics.add(SQUARES, len(self.paths), "sum")

    @torch.no_grad()
    def on_step_begin(self, step: int) -> None:
        """The late screen looks at the norms of the step before."""
        self.agreement.compare(step)
        squares = self._squares if self.statistics is None else self.statistics.get(SQUARES)
        self._alarm = False
        if self.screen == "late" and squares is not None:
            self._alarm = self._look_at(_log(squares.double().cpu()) / 2)

    @torch.no_grad()
    def on_backward_end(self, step: int) -> None:
        """Check, where it is due or the screen asks for it, and repair."""
        self.gradients.look()
        due, alarm = step % self.every == 0, self._alarm
        norms = None
        if self.screen == "now":
            norms = _log(self.gradients.norms())
            alarm = bool(self._suspicious(norms).any())
        elif self.screen == "late":
            self._keep_squares()
        self.flagged, self.held = [], {}
        if due or alarm:
            reading, poisoned = read(self.gradients, self.sample)
            self._repair(reading, poisoned, due)
            norms = reading.norms if norms is None else norms
        if norms is not None and self.screen != "late":
            self.history.add_norms(norms, self.held)
        self.gradients.release()
        self.agreement.put([step, *self.flagged])

    def on_step_end(self, step: int, metrics: dict[str, Any]) -> None:
        """Adds ``purified_paths``, the number of paths that were corrected in this step."""
        metrics["purified_paths"] = len(self.flagged)
        for fields in self._told:
            if self.tell is not None:
                self.tell("purify", **fields)
        self._told = []

    def state_dict(self) -> dict[str, Any]:
        """What paths were like, and what a step leaves for the next one."""
        return {
            "names": [path.name for path in self.paths],
            "history": self.history.state_dict(),
            "in_a_row": list(self.in_a_row),
            "held": [[path, norm] for path, norm in self.held.items()],
            "squares": self._squares,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo of ``state_dict``.

        Raises:
            InputError: the state is of other paths.
        """
        check_names(state["names"], self.paths)
        self.history.load_state_dict(state["history"])
        self.in_a_row, self.held = list(state["in_a_row"]), dict(state["held"])
        self._squares = None if state["squares"] is None else state["squares"].to(self.gradients.device)

    # -- screen

    def _look_at(self, norms: Numbers) -> bool:
        """Whether the step before calls for a check; its norms become part of the past."""
        odd = self._suspicious(norms).nonzero()[0].tolist()
        held = {path: self.history.norm[path] + self.settings.release for path in odd}
        self.history.add_norms(norms, held | self.held)
        return bool(odd)

    def _suspicious(self, norms: Numbers) -> Flags:
        return suspicious(norms, self.history, self._episode, self.settings)

    @property
    def _episode(self) -> Flags:
        return np.array(self.in_a_row) > 0

    def _keep_squares(self) -> None:
        squares = self.gradients.squares()
        if self.statistics is not None:
            self.statistics.put(SQUARES, squares * self.gradients.share)
        else:
            self._squares = self.gradients.reduce(squares)

    # -- check

    def _repair(self, reading: Reading, poisoned: list[int], due: bool) -> None:
        """Correct what is contaminated. The past of quantiles is of checks that are due: others come when something is wrong."""
        self.checks += 1
        verdict = judge(reading, self.history, self.kinds, self._episode, self.settings)
        self.flagged = verdict.flagged
        usual = np.where(self.history.mature, self.history.norm, verdict.norm) + self.settings.release
        self.held = {path: float(usual[path]) for path in self.flagged}
        corrections = self._correct(reading, verdict) if self.flagged else {}
        corrections |= dict.fromkeys(poisoned)
        for index in range(len(self.paths)):
            self.in_a_row[index] = self.in_a_row[index] + 1 if index in corrections else 0
        for index, correction in corrections.items():
            self._tell_of(index, verdict, correction)
        if due:
            self.history.add_check(reading, verdict, self.settings)

    def _correct(self, reading: Reading, verdict: Verdict) -> dict[int, float | None]:
        """→ what the norm of each flagged path was multiplied by."""
        for path in self.flagged:
            largest = float(np.exp(verdict.peak[path]))
            for view in self.gradients.of(path):
                move_down(view.data, reading.quantiles[path], verdict.target[path] + TOLERANCE, self.strength)
                most = min(largest, torch.finfo(view.data.dtype).max)
                view.data.clamp_(-most, most)
        norms, before = self.gradients.exact(self.flagged).sqrt().numpy(), np.exp(reading.norms[self.flagged])
        scale = np.minimum(np.exp(verdict.norm[self.flagged]) / norms, 1.0)
        for path, factor in zip(self.flagged, scale.tolist(), strict=True):
            if factor < 1:
                for view in self.gradients.of(path):
                    view.data.mul_(factor)
        return dict(zip(self.flagged, (norms * scale / before).tolist(), strict=True))

    def _tell_of(self, index: int, verdict: Verdict, correction: float | None) -> None:
        count = self.in_a_row[index]
        if count == 10 ** (len(str(count)) - 1):
            score = None if correction is None else float(verdict.score[index])
            self._told.append({"path": self.paths[index].name, "score": score, "correction": correction, "in_a_row": count})


def _log(values: Tensor) -> Numbers:
    """−inf of zero."""
    return values.log().numpy()
