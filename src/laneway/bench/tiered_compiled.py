"""torch.compile of the blocks under its own budget of activation memory: what a block saves, and what it computes again.

``torch._functorch.config.activation_memory_budget`` goes from 1 (torch's default: all that a backward pass wants is saved, except
what is cheap) to 0 (as checkpointing). All blocks share one compiled function.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import nn


def compiled(model: nn.Module, budget: float) -> Callable[[], AbstractContextManager[None]]:
    """A context in which the model's blocks run compiled; the same compiled code each time it is entered."""

    def backend(graph: Any, inputs: Any) -> Any:  # one of its own, so that torch keeps its code apart from that of other budgets
        from torch._inductor.compile_fx import compile_fx

        with functorch_config.patch(activation_memory_budget=budget):
            return compile_fx(graph, inputs)

    blocks = list(model.blocks)  # type: ignore[arg-type]
    function = torch.compile(type(blocks[0]).forward, backend=backend)

    @contextmanager
    def around() -> Generator[None]:
        for block in blocks:
            block.forward = partial(function, block)
        try:
            yield
        finally:
            for block in blocks:
                del block.forward

    return around
