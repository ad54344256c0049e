"""What ``wrap_model`` gives back where the model is not cut into stages."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from laneway.cluster.layout import Layout
from laneway.core import LanewayError
from laneway.strategy.base import LossFn, Wrapped, next_token_loss

__all__ = ["WrappedModel"]


class WrappedModel(Wrapped):
    """A model that trains by its layout. Call it as the model, or let ``step`` do the micro-batches.

    Names of parameters and of ``state_dict`` are the model's own; ``module`` is the model, sharded in place.

    Args:
        model: with everything applied that changes it in place.
        call: what a forward pass calls: the model, or DDP around it.
        layout, mesh, device: see ``Wrapped``.
        memory: made by a memory manager: a context within which forward and backward passes run.
    """

    def __init__(
        self,
        model: nn.Module,
        call: nn.Module,
        layout: Layout,
        mesh: DeviceMesh | None,
        device: torch.device,
        memory: AbstractContextManager[Any] | None = None,
    ) -> None:
        super().__init__(layout, mesh, device)
        self.module, self.memory = model, memory
        self._call = (call,)  # in a tuple: DDP's parameters are the model's
        self._managing = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns.

        Raises:
            LanewayError: a training pass outside of the memory manager's context.
        """
        if self.memory is not None and not self._managing and torch.is_grad_enabled():
            raise LanewayError("this model's memory is managed: train with model.step(…), or within `with model.managed():`")
        with self._autocast():
            return self._call[0](*args, **kwargs)

    def step(self, inputs: Tensor, targets: Tensor, loss_fn: LossFn = next_token_loss) -> Tensor:
        """Forward and backward of this data rank's share of a batch, in micro-batches of ``layout.micro_batch`` rows.

        Gradients are then complete and averaged over all ranks, as those of one process on the whole batch.

        Args:
            inputs: [rows, …], what the model is called with.
            targets: [rows, …].
            loss_fn: mean loss of a micro-batch from the model's output and its targets.

        Returns:
            The loss, averaged over micro-batches and data ranks; the same on every rank.
        """
        parts = self._micro_batches(inputs, targets)
        total = torch.zeros((), device=self.device)
        with nullcontext() if self._managing else self.managed():
            for index, (x, y) in enumerate(parts):
                with self.accumulating(last=index == len(parts) - 1):
                    loss = loss_fn(self(x), y) / len(parts)
                    loss.backward()
                total += loss.detach()
        return self._mean(total)

    @contextmanager
    def accumulating(self, last: bool) -> Generator[None]:
        """Around forward and backward of one micro-batch: gradients are reduced over the ranks when the ``last`` one ends.

        With zero 2 and 3, shards are reduced after each (so no whole gradients are kept), replicas after the last. With zero 1,
        gathered parameters are also kept for the next micro-batch.
        """
        call = self._call[0]
        if isinstance(call, DistributedDataParallel) and not last:
            with call.no_sync():
                yield
            return
        if isinstance(call, FSDPModule):
            if self.layout.zero == 1:
                call.set_requires_gradient_sync(last)
                call.set_reshard_after_backward(last)
            else:
                call.set_requires_all_reduce(last)
        yield

    @contextmanager
    def managed(self) -> Generator[None]:
        """Around training passes, with the memory manager on (nothing without one)."""
        if self._managing:
            raise LanewayError("the memory manager is on already")
        with self.memory or nullcontext():
            self._managing = True
            try:
                yield
            finally:
                self._managing = False

    def close(self) -> None:
        """Give back what the memory manager holds."""
        if hasattr(self.memory, "close"):
            self.memory.close()

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Any:
        """The model's, by its names."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's, by its names; split tensors stay split."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's."""
        return self.module.load_state_dict(*args, **kwargs)

    def _autocast(self) -> AbstractContextManager[Any]:
        """bf16 sub-layers over fp32 parameters. FSDP2 casts by its own policy instead."""
        if self.layout.precision == "fp32" or isinstance(self.module, FSDPModule):
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)
