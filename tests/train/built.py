"""What tests need of a run: its model, which the loop builds for itself, and an end in its midst."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from laneway.core import LanewayError
from laneway.train import loop


@contextmanager
def shown(see: Callable[[torch.nn.Module], None]) -> Iterator[None]:
    """Runs that begin in here show their model once it is built: ``see(model)``."""
    build = loop.build

    def building(*args: Any) -> Any:
        bench = build(*args)
        see(bench.parallel.model)
        return bench

    loop.build = building
    try:
        yield
    finally:
        loop.build = build


class Stops:
    """An extension that ends its run at a step; 0: never."""

    def __init__(self, at: int = 0) -> None:
        self.at = at

    def on_step_begin(self, step: int) -> None:
        """Raise at the step."""
        if step == self.at:
            raise LanewayError("as if killed")

    def on_backward_end(self, step: int) -> None:
        """Nothing."""

    def on_step_end(self, step: int, metrics: dict[str, Any]) -> None:
        """Nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing."""
