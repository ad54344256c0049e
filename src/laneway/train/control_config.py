"""What watches over the streams and gradients of a run. By default all of it is off: the run without it, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from laneway.connections.curvature import WIDEST
from laneway.connections.gates import strength_in_range
from laneway.connections.purify import SCREENS
from laneway.connections.schedule import Schedule
from laneway.core import InputError, choice, collect, positive_int, problems_of, real
from laneway.models.gpt import GPTConfig

AUTO = "auto"


@dataclass(frozen=True)
class ControlConfig:
    """Controls of streams and gradients; each is off until its field says otherwise."""

    curvature: float | str = 0.0
    """λ of the curvature constraint, 0 to 1, or auto (chosen as the run goes); 0, with curvature_final as it is: off."""
    curvature_final: float | None = None
    """λ at the last step, reached linearly from ``curvature``; None: λ stays."""
    curvature_every: int = 8
    """Steps between two measurements of curvature."""
    curvature_sample: int = 64
    """Tokens that a measurement looks at, for each stream and rank."""
    curvature_neighbours: int = 12
    """Nearest neighbours that reconstruct a token."""
    curvature_projection: int | None = None
    """Dimensions that tokens are projected to, at most 32 and the width of a stream; None: 16 or that width."""
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
    """How far shares of recent use (|gradient × map|) set the priorities, from 0 to below 1."""
    scheduler_damping: float = 0.5
    """How far writes to streams that are too alike are held back, ≥ 0; 0: not at all."""
    scheduler_keep_total: bool = True
    """Whether a token's writes add up to what they would without the scheduler."""
    scheduler_every: int = 8
    """Steps between two measurements of use and likeness."""
    write_strength: float = 1.0
    """Every write times this number, above 0 up to 1: what the curvature constraint must beat, and cheaper; 1: off."""
    priorities: tuple[float, ...] = ()
    """Shares of the streams, the same for all tokens, a number > 0 each; only their ratios count. What the scheduler must beat,
    and cheaper; none: off."""
    verify_ranks: bool = False
    """Compare a hash of each decision over the ranks; the run stops where two differ."""

    @property
    def constrains(self) -> bool:
        """Whether the curvature constraint is on."""
        return self.curvature != 0 or self.curvature_final not in (None, 0)

    @property
    def shapes_model(self) -> bool:
        """Whether the model has parameters or constants that the weights alone do not tell."""
        return self.scheduler or bool(self.priorities) or self.write_strength != 1

    def problems(self, prefix: str = "control") -> list[InputError]:
        """Everything that is wrong with these fields, one error a field."""
        return problems_of(self, f"{prefix}.", lambda sound: sound._out_of_range(prefix))

    def _out_of_range(self, prefix: str) -> list[InputError]:
        checks: list[Callable[[], object]] = [
            lambda: self._check_strength(prefix),
            lambda: positive_int(f"{prefix}.curvature_every", self.curvature_every),
            lambda: self._check_sample(prefix),
            lambda: self._check_projection(f"{prefix}.curvature_projection"),
            lambda: positive_int(f"{prefix}.purify_every", self.purify_every, 0),
            lambda: choice(f"{prefix}.purify_screen", self.purify_screen, SCREENS),
            lambda: positive_int(f"{prefix}.purify_sample", self.purify_sample, 64),
            lambda: self._check_guard(f"{prefix}.norm_guard"),
            lambda: self._check_write_strength(f"{prefix}.write_strength"),
            lambda: self._check_priorities(f"{prefix}.priorities"),
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
        """Raise InputError where a control of streams can't work on this model."""
        single = model.residual == "residual" or model.streams == 1
        offs = (("curvature", 0), ("curvature_final", None), ("scheduler", False), ("write_strength", 1.0), ("priorities", ()))
        for name, off in offs:
            if single and getattr(self, name) not in (off, 0):
                accepted = f"{off} for one stream: model.residual with maps and model.streams ≥ 2"
                raise InputError(f"{prefix}.{name}", getattr(self, name), accepted)
        if self.constrains and (self.curvature_projection or 0) > model.dim:
            accepted = f"an integer from 1 to {min(model.dim, WIDEST)}, the width of a stream or {WIDEST}"
            raise InputError(f"{prefix}.curvature_projection", self.curvature_projection, accepted)
        if self.priorities and len(self.priorities) != model.streams:
            accepted = f"a number > 0 for each of {model.streams} streams"
            raise InputError(f"{prefix}.priorities", list(self.priorities), accepted)
        if self.scheduler:
            self._check_width(model.dim, prefix)
            for problem in self.schedule.problems((model.streams,), (model.dim,), f"{prefix}.scheduler_"):
                raise problem

    def _check_width(self, dim: int, prefix: str) -> None:
        """Damping compares subspaces of the streams, which have fewer dimensions than the streams."""
        least = self.schedule.directions + 1
        if self.scheduler_damping and dim < least:
            accepted = f"0 with model.dim = {dim}: streams that narrow have no subspaces to compare"
            raise InputError(f"{prefix}.scheduler_damping", self.scheduler_damping, accepted, f"model.dim ≥ {least} has them")

    def _check_strength(self, prefix: str) -> None:
        if self.curvature == AUTO:
            if self.curvature_final is not None:
                raise InputError(f"{prefix}.curvature_final", self.curvature_final, "nothing beside curvature = auto")
            return
        if isinstance(self.curvature, str):
            raise InputError(f"{prefix}.curvature", self.curvature, f"a number from 0 to 1, or {AUTO}")
        strength_in_range(f"{prefix}.curvature", self.curvature)
        if self.curvature_final is not None:
            strength_in_range(f"{prefix}.curvature_final", self.curvature_final)

    def _check_sample(self, prefix: str) -> None:
        positive_int(f"{prefix}.curvature_neighbours", self.curvature_neighbours, 2)
        name, given = f"{prefix}.curvature_sample", self.curvature_sample
        if positive_int(name, given) <= self.curvature_neighbours:
            raise InputError(name, given, f"an integer above curvature_neighbours = {self.curvature_neighbours}")

    def _check_projection(self, name: str) -> None:
        given = self.curvature_projection
        if given is not None and positive_int(name, given) > WIDEST:
            raise InputError(name, given, f"an integer from 1 to {WIDEST}")

    def _check_guard(self, name: str) -> None:
        real(name, self.norm_guard, lambda factor: factor == 0 or factor > 1, "a number > 1, or 0 for off")
        if self.norm_guard and self.purify_every:
            raise InputError(name, self.norm_guard, "0 beside purify_every: one of them corrects gradients")

    def _check_write_strength(self, name: str) -> None:
        given = self.write_strength
        real(name, given, lambda strength: 0 < strength <= 1, "a number above 0, up to 1 (off)")
        if given != 1 and self.constrains:
            raise InputError(name, given, "1 beside curvature: one of them sets how much is written")

    def _check_priorities(self, name: str) -> None:
        for share in self.priorities:
            real(name, share, lambda each: each > 0, "a number > 0 for each stream")
        if self.priorities and self.scheduler:
            raise InputError(name, list(self.priorities), "none beside the scheduler: one of them sets priorities")
