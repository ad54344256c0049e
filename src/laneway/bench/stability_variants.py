"""Who takes part in ``laneway bench stability``: a variant is a change of the model, and what is put on it before it trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from laneway.connections.controls import build
from laneway.connections.guard import PathNormGuard
from laneway.connections.purify import GradientPurifier
from laneway.core import Extension
from laneway.models.gpt import GPT


def nothing(model: GPT) -> list[Extension]:
    """No control and no extension."""
    return []


@dataclass(frozen=True)
class Variant:
    """One row of the matrix.

    Args:
        model: fields of the model's configuration.
        prepare: puts controls on a model's sites, and returns the extensions that take part in its steps.
        against: the variant that it must beat to earn its keep: of a mechanism its simplest control, else plain mHC.
    """

    model: dict[str, Any] = field(default_factory=lambda: {"residual": "mhc"})
    prepare: Callable[[GPT], list[Extension]] = nothing
    against: str = "mhc"


def guarded(model: GPT) -> list[Extension]:
    """The norm of each path's gradient against its own moving average."""
    return [PathNormGuard(model)]


def purified(model: GPT) -> list[Extension]:
    """Gradient purification with its usual interval, and a screen of all norms in every step."""
    return [GradientPurifier(model)]


def purified_unscreened(model: GPT) -> list[Extension]:
    """The same without the screen: only the checks that are due."""
    return [GradientPurifier(model, screen="off")]


def all_of(*parts: Callable[[GPT], list[Extension]]) -> Callable[[GPT], list[Extension]]:
    """Several, in this order."""
    return lambda model: [extension for part in parts for extension in part(model)]


def controlled(name: str, **options: Any) -> Callable[[GPT], list[Extension]]:
    """A control of ``connections.controls`` by its name."""
    return lambda model: [build(name, model, **options)]


RESIDUALS = ("residual", "hc", "mhc", "mhc-lite")
VARIANTS: dict[str, Variant] = {
    "residual": Variant({"residual": "residual"}),
    "hc": Variant({"residual": "hc"}),
    "mhc": Variant(),
    "mhc-lite": Variant({"residual": "mhc-lite"}),
    "mhc-constant": Variant(prepare=controlled("constant", strength=0.8)),
    "mhc-curvature": Variant(prepare=controlled("curvature"), against="mhc-constant"),
    "mhc-curvature-peers": Variant(prepare=controlled("curvature-peers"), against="mhc-constant"),
    "mhc-curvature-res": Variant(prepare=controlled("curvature-res"), against="mhc-constant"),
    "mhc-priorities": Variant(prepare=controlled("priorities")),
    "mhc-scheduler": Variant(prepare=controlled("scheduler"), against="mhc-priorities"),
    "mhc-scheduler-cold": Variant(prepare=controlled("scheduler", temperature=0.25), against="mhc-priorities"),
    "mhc-scheduler-logits": Variant(prepare=controlled("scheduler-logits"), against="mhc-priorities"),
    "mhc-guard": Variant(prepare=guarded),
    "mhc-purify": Variant(prepare=purified, against="mhc-guard"),
    "mhc-purify-unscreened": Variant(prepare=purified_unscreened, against="mhc-guard"),
    "mhc-all": Variant(prepare=all_of(controlled("curvature"), controlled("scheduler"), purified), against="mhc-all-controls"),
    "mhc-all-controls": Variant(prepare=all_of(controlled("constant", strength=0.8), controlled("priorities"), guarded)),
}
