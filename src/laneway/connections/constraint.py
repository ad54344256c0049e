"""``CurvatureConstraint``: what measures the curvature of a model's streams and sets the gates of its sites, step by step.

    constraint = CurvatureConstraint(model, strength=0.3)

``laneway train`` makes it for its own model, as ``control.curvature`` says.

A path is a stream at a site. Every ``every`` steps the forward pass leaves a sample of each path's tokens, and once the gradients
are there the curvature of all paths is computed together. When the next step begins the gates follow; within a step they are
constants. Ranks add their sums in the collective that the loop runs anyway, and the same sums make the same gates everywhere.
In a loop of one's own: ``on_step_begin``, forward and backward, ``on_backward_end``, ``on_step_end``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from laneway.connections.control import Maps, attach, detach, require_sites
from laneway.connections.curvature import MovingCurvature, TokenSample, check_neighbours, local_curvature
from laneway.connections.gates import FORMS, REFERENCES, FixedGate, excess, gate_of, strength_in_range
from laneway.connections.late_sums import LateSums
from laneway.connections.layer import HyperConnection
from laneway.connections.tuning import AutoStrength, linear_strength
from laneway.core import InputError, choice, collect, positive_int, problems_of

NAME = "curvature"  # of the shared statistics
TOKENS, FEWEST = 16, 32  # tokens of a batch for each whose curvature is measured; how many are in any case


@dataclass(frozen=True)
class Measurement:
    """How curvature is measured (curvature.py)."""

    every: int = 8
    """Steps between two measurements."""
    sample: int = 64
    """Tokens, for each stream and rank. κ is the mean over all of them where a forward pass has ``TOKENS`` for each, and over
    a part of them where it has fewer, so that a small batch costs less."""
    neighbours: int = 12
    """Neighbours k that reconstruct a token."""
    projection: int | None = None
    """Dimensions, at most 32; None: 16, or the width of narrower streams."""
    decay: float = 0.9
    """Of the moving average, at each measurement."""
    window: int = 32
    """Measurements in the running median."""
    seed: int = 0
    """Of the projection and of the places of the tokens."""

    def dims(self, widths: set[int]) -> int:
        """Dimensions for streams of these widths."""
        return min(16, *widths) if self.projection is None else self.projection

    def stride(self, tokens: int) -> int:
        """κ is the mean over each so many-th token of the sample, in a forward pass over so many tokens."""
        return max(self.sample // max(tokens // TOKENS, FEWEST), 1)

    def samplers(self, widths: set[int]) -> nn.ModuleDict:
        """One for each width of streams, under its number; raises InputError for one of another type or out of range."""
        for problem in problems_of(self, "", lambda sound: sound._out_of_range()):
            raise problem
        return nn.ModuleDict({str(c): TokenSample(c, self.sample, self.dims(widths), self.seed) for c in sorted(widths)})

    def _out_of_range(self) -> list[InputError]:
        return collect([lambda: positive_int("every", self.every), lambda: check_neighbours(self.neighbours, self.sample)])


@dataclass(frozen=True)
class Rule:
    """How a gate follows from curvature (gates.py)."""

    form: str = "saturating"
    """saturating | exponential"""
    reference: str = "own"
    """own | peers"""
    res: bool = False
    """Whether H_res moves towards the identity with it."""

    def check(self) -> None:
        """Raise InputError for an unknown name, or a field of another type."""
        for problem in problems_of(self, "", lambda sound: sound._out_of_range()):
            raise problem

    def _out_of_range(self) -> list[InputError]:
        checks = [lambda: choice("form", self.form, FORMS), lambda: choice("reference", self.reference, REFERENCES)]
        return collect(checks)


class CurvatureGate(FixedGate):
    """A gate that also leaves a sample of the streams' tokens in ``points`` [n, S, d] while it is watching."""

    def __init__(self, streams: int, res: bool, take: Callable[[Tensor, Tensor], Tensor], points: Tensor) -> None:
        super().__init__(streams, res)
        self.acting = self.watching = False
        self.take, self.points = take, points
        self.tokens = torch.zeros(1, dtype=torch.int64)  # of the pass that was watched; a tensor, as all that a control notes

    def forward(self, site: HyperConnection, x: Tensor, pre: Tensor, post: Tensor, res: Tensor) -> Maps:
        """(H_pre, H_post, H_res) of this pass."""
        self._watch(x)
        return super().forward(site, x, pre, post, res)

    def write_factor(self, site: HyperConnection, x: Tensor) -> Tensor | None:
        """The gate among ones, where it leaves H_res alone."""
        if (found := super().write_factor(site, x)) is not None:
            self._watch(x)
        return found

    def _watch(self, x: Tensor) -> None:
        if self.watching:
            self.tokens.fill_(x.shape[:-2].numel())
            self.take(x, self.points)


class CurvatureConstraint(LateSums):
    """Gates on all sites of a model that have maps, set by curvature. An extension of the training loop.

    Args:
        model: on the device where it is trained.
        strength: λ from 0 to 1, an ``AutoStrength`` that chooses it, or a function of the step.
        final: λ at step ``steps``, reached linearly from ``strength``; None: λ stays.
        steps: length of that schedule.
        measurement: how curvature is measured.
        rule: how a gate follows from it.
        verify: compare a hash of each step's gates over the ranks, one step late, where a loop shares statistics.

    Raises:
        InputError: a value out of range, or a model without maps.
    """

    def __init__(
        self,
        model: nn.Module,
        strength: float | AutoStrength | Callable[[int], float] = 0.3,
        *,
        final: float | None = None,
        steps: int | None = None,
        measurement: Measurement | None = None,
        rule: Rule | None = None,
        verify: bool = False,
    ) -> None:
        self.strength = strength if isinstance(strength, AutoStrength) else _schedule(strength, final, steps)
        self.measurement, self.rule = measurement or Measurement(), rule or Rule()
        self.rule.check()
        sites = require_sites(model)
        self.model, self.streams, device = model, [site.streams for site in sites], sites[0].base.device
        self.samplers = self.measurement.samplers({site.dim for site in sites}).to(device)
        paths, dims = sum(self.streams), self.measurement.dims({site.dim for site in sites})
        self.moving = MovingCurvature(paths, self.measurement.decay, self.measurement.window).to(device)
        self.points = torch.full((paths, self.measurement.sample, dims), float("nan"), device=device)
        parts = self.points.split(self.streams)
        self.gates = attach(model, lambda site, place: self._made(site, parts[place]))
        self._telemetry = Telemetry(self.streams, device)
        super().__init__(NAME, torch.zeros(2 * paths, device=device), verify)
        self._watching = False
        self._current: float | None = None

    # -- what others may ask for

    @property
    def curvature(self) -> Tensor:
        """κ of every path, site after site; NaN where none was measured yet."""
        return self.moving.curvature

    @property
    def gate(self) -> Tensor:
        """g of every path."""
        return torch.cat([gate.gate for gate in self.gates])

    def apply_statistics(self, statistics: dict[str, Tensor]) -> None:
        """Take in sums over all ranks. The gates follow at the next ``on_step_begin``."""
        self.moving.update(*statistics[NAME].to(self._sums).chunk(2))
        self._current = None

    def remove(self) -> None:
        """Take the gates off the model."""
        detach(self.model, self.gates)

    # -- an extension's calls

    def on_step_begin(self, step: int) -> None:
        """Gates from the last measurement; watch, where one is due."""
        self.follow()
        strength = self.strength.value if isinstance(self.strength, AutoStrength) else self.strength(step)
        if strength != self._current:
            self._set_gates(strength_in_range("strength", strength))
        if self._agreement.statistics is not None:
            self.decided(self.gate)
        self._watch((step - 1) % self.measurement.every == 0)

    def on_backward_end(self, step: int) -> None:
        """Compute what was watched."""
        if not self._watching:
            return
        self._watch(False)
        stride = self.measurement.stride(max(gate.tokens.tolist()[0] for gate in self.gates))  # on the host: no wait
        self.measured(torch.cat(local_curvature(self.points, self.measurement.neighbours, stride)).float())

    def on_step_end(self, step: int, metrics: dict[str, Any]) -> None:
        """``curvature`` and ``gate`` [sites][streams] and ``lambda`` of this step."""
        seen = self._telemetry.row()
        metrics |= seen | {"lambda": self._current}
        if isinstance(self.strength, AutoStrength) and {"grad_norm", "loss"} <= metrics.keys():
            self.strength.see(self._telemetry.mean(), metrics["grad_norm"], metrics["loss"])

    def state_dict(self) -> dict[str, Any]:
        """Projection, places, averages, and what was measured and not yet applied."""
        auto = self.strength.state_dict() if isinstance(self.strength, AutoStrength) else {}
        parts = {"samplers": self.samplers.state_dict(), "moving": self.moving.state_dict()}
        return {**parts, "sums": self._sums.clone(), "pending": self._pending, "auto": auto}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo of ``state_dict``."""
        self.samplers.load_state_dict(state["samplers"])
        self.moving.load_state_dict(state["moving"])
        self._sums = state["sums"].to(self._sums)
        self._pending, self._current = bool(state["pending"]), None
        if isinstance(self.strength, AutoStrength):
            self.strength.load_state_dict(state["auto"])

    def _made(self, site: HyperConnection, points: Tensor) -> CurvatureGate:
        take = self.samplers[str(site.dim)].forward
        return CurvatureGate(site.streams, self.rule.res, take, points).to(points.device)

    def _set_gates(self, strength: float) -> None:
        found = gate_of(excess(self.curvature, self.moving.median, self.rule.reference), strength, self.rule.form)
        torch._foreach_copy_([gate.gate for gate in self.gates], found.split(self.streams))
        for gate in self.gates:
            gate.acting = strength > 0
        self._current = strength
        self._telemetry.take(self.curvature, found)

    def _watch(self, on: bool) -> None:
        if not on and not self._watching:
            return
        self._watching = on
        if on:
            self.points.fill_(float("nan"))
        for gate in self.gates:
            gate.watching = on


@dataclass
class Telemetry:
    """Numbers on their way to the metrics: copied when they are made, without waiting, and read when the step has ended."""

    streams: list[int]
    device: torch.device
    host: Tensor = field(init=False)
    _row: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self.host = torch.full((2, sum(self.streams)), float("nan"), pin_memory=self.device.type == "cuda")

    def take(self, curvature: Tensor, gate: Tensor) -> None:
        """κ and g of every path."""
        self.host.copy_(torch.stack([curvature, gate]), non_blocking=True)
        self._row = None

    def row(self) -> dict[str, Any]:
        """[sites][streams], None for what was not measured yet."""
        if self._row is None:
            curvature, gate = ([part.tolist() for part in line.split(self.streams)] for line in self.host)
            self._row = {"curvature": [[None if k != k else k for k in site] for site in curvature], "gate": gate}
        return dict(self._row)

    def mean(self) -> float | None:
        """Mean κ, None before the first measurement."""
        known = [k for k in self.host[0].tolist() if k == k]
        return sum(known) / len(known) if known else None


def _schedule(strength: float | Callable[[int], float], final: float | None, steps: int | None) -> Callable[[int], float]:
    if not callable(strength):
        return linear_strength(strength, final, steps)
    if final is not None:
        raise InputError("final", final, "None where strength is a function of the step")
    return strength
