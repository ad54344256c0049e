"""Whether a collective is in flight, so that transfers can leave it its share of the link."""

from __future__ import annotations

import threading

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel


class InFlight:
    """Counts collectives that have begun and not ended; calling it says whether there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self.seen = 0

    def __call__(self) -> bool:
        """Whether any collective is in flight."""
        return self._count > 0

    def begin(self) -> None:
        """A collective begins."""
        with self._lock:
            self._count += 1
            self.seen += 1

    def end(self) -> None:
        """A collective has ended."""
        with self._lock:
            self._count -= 1

    def watch(self, model: DistributedDataParallel) -> None:
        """Count the gradient reductions of ``model``, each from its begin to its end; they are DDP's own all-reduce."""

        def hook(group, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations as types, so none as text
            self.begin()
            return allreduce_hook(group, bucket).then(self._ended)

        model.register_comm_hook(model.process_group, hook)

    def _ended(self, future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        self.end()
        return future.value()
