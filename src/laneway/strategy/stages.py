"""This package's GPT cut into pipeline stages.

The first stage embeds and expands to n streams; every boundary carries the streams [b, t, n, C]; the last stage reads them out.
A tied head is a second copy on the last stage: both copies start equal, and their gradients are exchanged and added in every
step, so they stay equal.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from laneway.connections import StreamChain, expand_streams
from laneway.core import InputError
from laneway.models.gpt import GPT

__all__ = ["GPTStage", "layers_of_stage"]


def layers_of_stage(layers: int, stages: int, index: int) -> range:
    """The blocks of a stage: contiguous, and as even as can be; the first stages have one more where it does not divide.

    Raises:
        InputError: more stages than layers.
    """
    if stages > layers:
        raise InputError("layout.pp", stages, f"at most the model's {layers} layers in stages (pp × chunks)")
    each, more = divmod(layers, stages)
    first = index * each + min(index, more)
    return range(first, first + each + (index < more))


class GPTStage(nn.Module):
    """Stage ``index`` of ``stages``: the modules of ``model`` that it needs, under the names they have there.

    Tokens [b, t] (first stage) or streams [b, t, n, C] → streams, or logits [b, t, v] (last stage).
    """

    def __init__(self, model: GPT, index: int, stages: int) -> None:
        super().__init__()
        self.index, self.stages, self.config = index, stages, model.config
        self.streams, self.spread = model.streams, model.spread
        self.chained, self.recompute = model.chained, model.recompute
        self.autocast_dtype: torch.dtype | None = None
        self.first, self.last = index == 0, index == stages - 1
        self.blocks = nn.ModuleDict({str(i): model.blocks[i] for i in layers_of_stage(len(model.blocks), stages, index)})
        self.embedding = model.embedding if self.first else None
        self.readout: Any = model.readout if self.last else None
        self.norm: Any = model.norm if self.last else None
        self.head = model.head if self.last else None
        self.tied = stages > 1 and (self.first or self.last) and model.head.weight is model.embedding.weight
        if self.tied and self.last:
            self.head = _copy_of_head(model)
        self.register_buffer("rotary", model.rotary, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        with _autocast(x.device.type, self.autocast_dtype):
            if self.embedding is not None:
                x = self._expand(self.embedding(x))
            x = self._chained(x) if self.chained else self._block_by_block(x)
            return x if self.head is None else self.head(self.norm(self.readout(x)))

    def _expand(self, x_btc: Tensor) -> Tensor:
        if self.autocast_dtype is not None:
            x_btc = x_btc.to(self.autocast_dtype)
        return expand_streams(x_btc, self.streams, spread=self.spread)

    def _block_by_block(self, x: Tensor) -> Tensor:
        for block in self.blocks.values():
            x = block(x, self.rotary)
        return x

    def _chained(self, x: Tensor) -> Tensor:
        chain, f_btc = StreamChain(x, self.recompute or None), None
        for block in self.blocks.values():
            f_btc = block(f_btc, self.rotary, chain)
        if f_btc is not None:
            chain.leave(f_btc)
        return chain.streams()

    def shapes(self, micro_batch: int, time: int, dtype: torch.dtype, split: int = 1) -> tuple[Tensor, Tensor]:
        """Input and output of one micro-batch, as tensors on the meta device; ``dtype`` is the streams'.

        ``split``: ranks over which the sequence is divided between the sub-layers.
        """
        tokens = torch.empty(micro_batch, time, dtype=torch.int64, device="meta")
        streams = torch.empty(
            micro_batch, time // split, self.streams, self.config.dim, dtype=dtype, device="meta", requires_grad=True
        )
        logits = torch.empty(micro_batch, time, self.config.vocab_size, dtype=dtype, device="meta", requires_grad=True)
        return (tokens if self.first else streams), (logits if self.last else streams)


def _copy_of_head(model: GPT) -> nn.Linear:
    weight = model.head.weight
    head = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    head.weight = nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)
    return head


def _autocast(device: str, dtype: torch.dtype | None) -> Any:
    return torch.autocast(device, dtype=dtype or torch.bfloat16, enabled=dtype is not None)
