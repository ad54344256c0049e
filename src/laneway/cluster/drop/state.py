"""A rank's residuals and patterns as a tree of plain data and tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from laneway.cluster.drop.pieces import Piece, Pieces
from laneway.cluster.drop.residuals import Residuals
from laneway.core import InputError

__all__ = ["adopt_state", "check_state", "load_state", "save_state"]

_FIELDS = ("step", "slots", "strays")
_SLOT = ("pieces", "residual", "root", "observed", "last", "seen")


def save_state(residuals: Residuals) -> dict[str, Any]:
    """Step, slots and strays; tensors are copies."""
    with residuals.lock:
        slots = [
            {
                "pieces": [_plain(piece) for piece in pieces.pieces],
                "residual": None if slot.residual is None else slot.residual.clone(),
                "root": slot.pattern.root.clone(),
                "observed": slot.pattern.steps,
                "last": slot.last,
                "seen": pieces in residuals.seen,
            }
            for pieces, slot in residuals.slots.items()
        ]
        strays = [{"piece": _plain(piece), "residual": run.clone()} for piece, run in residuals.strays]
        return {"step": residuals.step, "slots": slots, "strays": strays}


def check_state(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state, if it is one.

    Raises:
        InputError: fields or lengths that don't fit.
    """
    if not isinstance(state, Mapping) or any(name not in state for name in _FIELDS):
        given = sorted(state) if isinstance(state, Mapping) else type(state).__name__
        raise InputError("state", given, "what state_dict() gave: " + ", ".join(_FIELDS))
    for place, slot in enumerate(state["slots"]):
        if any(name not in slot for name in _SLOT):
            raise InputError(f"state.slots.{place}", sorted(slot), ", ".join(_SLOT))
        pieces = _pieces(slot)
        _check_length(f"state.slots.{place}.root", slot["root"], len(pieces.pieces))
        if slot["residual"] is not None:
            _check_length(f"state.slots.{place}.residual", slot["residual"], pieces.numel)
    for place, stray in enumerate(state["strays"]):
        _check_length(f"state.strays.{place}.residual", stray["residual"], len(Piece(*stray["piece"])))
    return state


def load_state(residuals: Residuals, state: Mapping[str, Any]) -> None:
    """Replace what is there."""
    with residuals.lock:
        residuals.slots.clear()
        residuals.step = int(state["step"])
        for slot in state["slots"]:
            residuals.add(_pieces(slot), slot["residual"], slot["root"], int(slot["observed"]), int(slot["last"]))
        residuals.seen = {_pieces(slot) for slot in state["slots"] if slot["seen"]}
        residuals.strays = _strays(state) if residuals.dtype is not None else []


def adopt_state(residuals: Residuals, state: Mapping[str, Any]) -> None:
    """Add another rank's residuals to the strays."""
    if residuals.dtype is None:
        return
    with residuals.lock:
        for slot in state["slots"]:
            if slot["residual"] is None:
                continue
            for start, piece in _pieces(slot):
                run = slot["residual"][start : start + len(piece)]
                if piece.name and bool(run.any()):
                    residuals.strays.append((piece, run.clone()))
        residuals.strays += _strays(state)


def _plain(piece: Piece) -> list[Any]:
    return [piece.name, piece.start, piece.stop, piece.numel]


def _pieces(slot: Mapping[str, Any]) -> Pieces:
    return Pieces(tuple(Piece(*piece) for piece in slot["pieces"]))


def _strays(state: Mapping[str, Any]) -> list[tuple[Piece, Tensor]]:
    return [(Piece(*stray["piece"]), stray["residual"].clone()) for stray in state["strays"]]


def _check_length(field: str, tensor: Any, length: int) -> None:
    if not isinstance(tensor, Tensor) or tuple(tensor.shape) != (length,):
        given = list(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise InputError(field, given, f"a tensor of {length} numbers")
