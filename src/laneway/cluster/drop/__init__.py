"""Gradients of which only the large entries travel over a slow level, with error feedback on both sides.

`GradientDropper` and `PowerSGD` need torch and are imported on first use; pieces and sizes of messages don't.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from laneway.cluster.drop.pieces import Piece, Pieces
from laneway.cluster.drop.sizes import drop_for_saving, exchange_bytes

if TYPE_CHECKING:
    from laneway.cluster.drop.dropper import GradientDropper
    from laneway.cluster.drop.powersgd import PowerSGD

__all__ = ["GradientDropper", "Piece", "Pieces", "PowerSGD", "drop_for_saving", "exchange_bytes"]


def __getattr__(name: str) -> Any:
    """Import what needs torch on first use (PEP 562)."""
    if name == "GradientDropper":
        from laneway.cluster.drop.dropper import GradientDropper

        return GradientDropper
    if name == "PowerSGD":
        from laneway.cluster.drop.powersgd import PowerSGD

        return PowerSGD
    raise AttributeError(f"module 'laneway.cluster.drop' has no attribute {name!r}")
