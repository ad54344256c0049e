"""Hyper-connections put into a plain model, the same function at the start."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from laneway.connections.convert import convert, is_converted
from laneway.core import InputError, positive_int
from laneway.models.gpt import GPT, RESIDUALS

__all__ = ["streams_of", "with_streams"]


def streams_of(model: Any) -> int:
    """Residual streams that a model has."""
    if isinstance(model, GPT):
        return model.streams
    return model.config.laneway["streams"] if is_converted(model) else 1


def with_streams(model: nn.Module, streams: int | None, manifold: str = "sinkhorn") -> nn.Module:
    """The model with that many streams; None leaves it as it is.

    A plain GPT of this package is built again around the same weights, a plain transformers model is converted in place.

    Raises:
        InputError: the model has another number of streams already, or can't be converted.
    """
    if streams is None or positive_int("streams", streams) == streams_of(model):
        return model
    if streams_of(model) > 1:
        raise InputError("streams", streams, f"None, or the {streams_of(model)} that the model has")
    if isinstance(model, GPT):
        return _wider(model, streams, manifold)
    return convert(model, streams, manifold=manifold)


def _wider(model: GPT, streams: int, manifold: str) -> GPT:
    name = {kind: name for name, kind in RESIDUALS.items()}.get(manifold)
    if name is None:
        raise InputError("manifold", manifold, "one of " + ", ".join(kind for kind in RESIDUALS.values() if kind))
    weight = model.embedding.weight
    wide = GPT(replace(model.config, residual=name, streams=streams)).to(weight.device, weight.dtype)
    missing, _ = wide.load_state_dict(model.state_dict(), strict=False, assign=True)
    wide.head.weight = wide.embedding.weight
    assert all(".site_" in key or key.startswith("readout.") for key in missing)
    return wide.train(model.training)
