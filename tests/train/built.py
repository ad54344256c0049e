"""What a test needs of a run's model, which the loop builds for itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

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
