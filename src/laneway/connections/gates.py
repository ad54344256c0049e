"""Gates: how much of what a sub-layer writes reaches each stream. H_post is multiplied by g in (0, 1], one number a stream.

``FixedGate`` applies numbers, ``ConstantStrength`` one for all streams, ``excess`` and ``gate_of`` make them from curvature:

    r = max(0, κ / reference − 1),    g = 1 − λ r / (1 + r)   (saturating: never under 1 − λ)
                                      g = exp(−λ min(r, 8))   (exponential)

The reference is the path's own running median, or the larger of that and the median of all paths (``peers``), and at least
``FLAT``, under which κ is rounding and chance. At λ = 0, and wherever κ is at or under its own running median, g is 1 exactly.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from laneway.connections.control import ControlStack, Maps, StreamControl, control_parts, controlled_sites
from laneway.connections.curvature import lower_median
from laneway.core import InputError, choice, positive_int, real

if TYPE_CHECKING:
    from laneway.connections.layer import HyperConnection

FORMS = ("saturating", "exponential")
REFERENCES = ("own", "peers")
FLAT = 1e-3
LARGEST = 8.0  # excess beyond which the exponential gate closes no further
_PLACE = re.compile(r"controls\.(\d+)\.")
LIMIT = 1e6  # the largest excess: at λ = 1 the saturating gate stays above zero in fp32


def strength_in_range(field: str, given: object) -> float:
    """λ, a number from 0 to 1; raises InputError."""
    return real(field, given, lambda strength: 0 <= strength <= 1, "a number from 0 to 1")


def excess(curvature: Tensor, median: Tensor, reference: str = "own") -> Tensor:
    """r ≥ 0 of each path; 0 where nothing was measured yet.

    Raises:
        InputError: an unknown reference.
    """
    if choice("reference", reference, REFERENCES) == "peers":
        median = torch.maximum(median, lower_median(curvature[:, None]))
    return torch.nan_to_num(curvature / median.clamp(min=FLAT) - 1, nan=0.0).clamp(min=0, max=LIMIT)


def gate_of(excess: Tensor, strength: float, form: str = "saturating") -> Tensor:
    """g in (0, 1] of each path.

    Raises:
        InputError: strength λ outside [0, 1], or an unknown form.
    """
    strength_in_range("strength", strength)
    if choice("form", form, FORMS) == "saturating":
        return 1 - strength * (excess / (1 + excess))
    return torch.exp(-strength * excess.clamp(max=LARGEST))


class FixedGate(StreamControl):
    """H_post times ``gate`` [n], and where ``res`` is on, H_res moved towards the identity by 1 − (mean of the gate).

    A doubly stochastic H_res stays one: both ends are, and every stream moves by the same part. An orthogonal one doesn't, and
    is refused. ``gate`` is a buffer: it is part of the function, so it must go where the weights go (``restore_gates``).

    Raises:
        InputError: ``res`` at a site whose H_res would leave its manifold.
    """

    gate: Tensor

    def __init__(self, streams: int, res: bool = False) -> None:
        super().__init__()
        self.acting = True
        self._ones: tuple[Tensor, Tensor] | None = None
        self.register_buffer("gate", torch.ones(positive_int("streams", streams), dtype=torch.float32))
        self.register_buffer("moves_res", torch.tensor(True) if res else None)
        self._around()

    def check_site(self, site: HyperConnection) -> None:
        """Raise InputError where H_res, moved, would leave its manifold."""
        if self.moves_res is not None and site.manifold == "orthogonal":
            accepted = "False for sites with manifold 'orthogonal': H_res moved towards the identity is no longer orthogonal"
            raise InputError("res", True, accepted)

    def write_factor(self, site: HyperConnection, x: Tensor) -> Tensor | None:
        """The gate among ones, where it leaves H_res alone."""
        if not self.acting or self.moves_res is not None:
            return None
        before, behind = self._around()
        return torch.cat((before, self.gate, behind))

    def _around(self) -> tuple[Tensor, Tensor]:
        """Ones for H_pre and for H_res, where the gate is."""
        if self._ones is None or self._ones[0].device != self.gate.device:
            n = len(self.gate)
            self._ones = torch.ones(n, device=self.gate.device), torch.ones(n * n, device=self.gate.device)
        return self._ones

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FixedGate:
        super()._apply(fn, recurse)
        self._around()
        return self

    def forward(self, site: HyperConnection, x: Tensor, pre: Tensor, post: Tensor, res: Tensor) -> Maps:
        """(H_pre, H_post, H_res) of this pass."""
        if not self.acting:
            return pre, post, res
        gate = self.gate.to(post.dtype)
        if self.moves_res is not None:
            self.check_site(site)
            keep = gate.mean()
            res = res * keep + torch.eye(len(gate), dtype=res.dtype, device=res.device) * (1 - keep)
        return pre, post * gate, res


class ConstantStrength(FixedGate):
    """The simplest control: every write times one number, for good.

    Raises:
        InputError: strength outside (0, 1].
    """

    def __init__(self, streams: int, strength: float) -> None:
        super().__init__(streams)
        if strength_in_range("strength", strength) == 0:
            raise InputError("strength", strength, "a number above 0, up to 1")
        self.gate.fill_(strength)
        self.acting = strength != 1


def restore_gates(model: nn.Module, state: Mapping[str, Tensor]) -> int:
    """Give a model the gates that a state dict holds, as ``FixedGate``s that ``load_state_dict`` then fills; returns how many.

    A network that was trained under gates computes another function without them, and a strict ``load_state_dict`` says so.
    Among other controls (a scheduler, priorities) gates take the places that they had; the others are part of the model before,
    in their order. Gates that a site of the model has already make way for those of ``state``.

    Raises:
        InputError: the state holds a gate behind more other controls than the model has at that site.
    """
    found = 0
    names = {module: name for name, module in model.named_modules()}
    for site in controlled_sites(model):
        prefix = f"{names[site]}.control." if names[site] else "control."
        parts = [key.removeprefix(prefix).removesuffix("gate") for key in state if _is_gate(key, prefix)]
        gates = {part: FixedGate(site.streams, f"{prefix}{part}moves_res" in state) for part in parts}
        if gates:
            site.control = _placed(gates, site.control, prefix).to(site.base.device)
            found += len(gates)
    return found


def _is_gate(key: str, prefix: str) -> bool:
    return key.startswith(prefix) and key.rpartition(".")[2] == "gate"


def _placed(gates: Mapping[str, FixedGate], control: nn.Module | None, prefix: str) -> StreamControl:
    """Gates by their part of the key: "" stands alone, "controls.1." is the second of a stack."""
    if list(gates) == [""]:
        return gates[""]
    stack = [part for part in control_parts(control) if not isinstance(part, FixedGate)]
    by_place = {int(found[1]) if (found := _PLACE.fullmatch(part)) else -1: part for part in gates}
    for place, part in sorted(by_place.items()):
        if not 0 <= place <= len(stack):
            accepted = "a gate alone or in one stack, behind no more other controls than the model has"
            raise InputError("state", f"{prefix}{part}gate", accepted, "build the other controls first, in their order")
        stack.insert(place, gates[part])
    return ControlStack(stack)
