"""What a block keeps for its backward pass, and what it computes again."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from laneway.cluster.layout import Layout
from laneway.connections import block_length
from laneway.core import InputError
from laneway.models.gpt import GPT, Attention
from laneway.strategy.data_parallel import blocks_of

__all__ = ["apply_recompute"]


def apply_recompute(model: nn.Module, layout: Layout) -> None:
    """Apply ``layout.recompute``, in place.

    ``full`` keeps the input of each block. ``selective`` computes the part of attention without weights again, and with n > 1
    streams also makes the streams between sites again, all but those of every k-th site (arXiv 2512.24880, Eq. 20).

    Raises:
        InputError: ``selective`` for a model other than this package's GPT, or ``full`` for one without repeated blocks.
    """
    if isinstance(model, GPT):
        model.chained = layout.recompute != "full"
        model.recompute = 0
    if layout.recompute == "selective":
        _selective(model)
    elif layout.recompute == "full":
        _full(model)


def _full(model: nn.Module) -> None:
    blocks = blocks_of(model)
    if not blocks:
        raise InputError("layout.recompute", "full", "none for a model without a list of blocks")
    config: Any = getattr(model, "config", None)
    if getattr(config, "use_cache", False):
        config.use_cache = False  # a block that runs twice would write its keys and values twice
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def _selective(model: nn.Module) -> None:
    if not isinstance(model, GPT):
        raise InputError("layout.recompute", "selective", f"none or full for {type(model).__name__}")
    for module in model.modules():
        if isinstance(module, Attention):
            module.attend = functools.partial(checkpoint, module.attend, use_reentrant=False)
    if model.streams > 1:
        model.recompute = block_length(model.config.sites, model.streams)
