"""Whether a collective is in flight, so that transfers can leave it its share of the link."""

from __future__ import annotations

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from laneway.memory.sharing import Sharing


class InFlight(Sharing):
    """Told of the gradient reductions of DDP by itself; of others by ``begin`` and ``end``, or ``collective``."""

    def watch(self, model: DistributedDataParallel) -> None:
        """Count the gradient reductions of ``model``, each from its begin to its end; they are DDP's own all-reduce."""

        def hook(group, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations as types, so none as text
            self.begin()
            return allreduce_hook(group, bucket).then(self._ended)

        model.register_comm_hook(model.process_group, hook)

    def _ended(self, future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        self.end()
        return future.value()
