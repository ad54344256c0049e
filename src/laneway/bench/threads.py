"""A number of threads for one benchmark, put back afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def using_threads(count: int) -> Iterator[None]:
    """Use ``count`` threads of torch inside the block; 0 leaves their number alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
