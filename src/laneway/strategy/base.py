"""What wrapped models and stages have in common, whatever their layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from laneway.cluster.layout import Layout
from laneway.core import InputError, LanewayError
from laneway.models.gpt import GPT, rotary_table
from laneway.strategy.norms import clip, total_norm
from laneway.strategy.stages import GPTStage
from laneway.strategy.whole import full_state, groups_of

__all__ = ["LossFn", "Wrapped", "next_token_loss"]

LossFn = Callable[[Any, Tensor], Tensor]


def next_token_loss(output: Any, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats, in fp32: logits [b, t, v] (or what has them as ``.logits``), targets [b, t]."""
    logits = getattr(output, "logits", output)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class Wrapped(nn.Module):
    """Common to whole models and to stages: ``step``, ``clip_grad_norm_``, ``param_groups``, ``full_state_dict``.

    Attributes:
        layout: degrees of parallelism and dials.
        mesh: the ranks by axis; None for one process without a process group.
        device: where the weights are.
    """

    def __init__(self, layout: Layout, mesh: DeviceMesh | None, device: torch.device) -> None:
        super().__init__()
        self.layout, self.mesh, self.device = layout, mesh, device

    @property
    def data_ranks(self) -> int:
        """Shares that a batch is divided into."""
        return self.layout.dp

    @property
    def data_rank(self) -> int:
        """Which share is this rank's. Ranks of one tp or pp group have the same, and are given the same tokens."""
        if self.mesh is None:
            return 0
        return self.mesh.get_local_rank("dp_replicate") * self.layout.dp_shard + self.mesh.get_local_rank("dp_shard")

    @torch.no_grad()
    def clip_grad_norm_(self, most: float) -> Tensor:
        """Scale the gradients down to a global norm of at most ``most``; returns the norm before, the same on every rank.

        Call it after the last micro-batch of a step; ``float("inf")`` only measures.
        """
        counted = [p.grad for p in self._counted() if p.grad is not None]
        norm = total_norm(counted, self.mesh, ("pp",) if self.layout.pp > 1 else ())
        if most != float("inf"):
            clip(self.parameters(), most, norm)
        return norm

    def param_groups(self, weight_decay: float = 0.1) -> list[dict[str, Any]]:
        """Groups for an optimizer: matrices with decay, maps, norms, biases and embeddings without, none with tensors that are
        split in different ways (torch's multi-tensor optimizers refuse those in one group).
        """
        return groups_of(self, weight_decay, self._undecayed())

    def full_state_dict(self) -> dict[str, Tensor]:
        """All weights, whole and on the CPU, by the names of the model before it was wrapped. Every rank must call it."""
        return full_state(self.state_dict(), self.mesh, self.layout)

    def to_empty(self, *, device: Any, recurse: bool = True) -> Any:
        """Storage for a model from the meta device; its weights are then to be loaded. The GPT's rotary table is made again.

        Raises:
            LanewayError: a buffer that is in no state dict, so that nothing would fill it.
        """
        lost = {
            f"{name}.{buffer}"
            for name, module in self.named_modules()
            if not isinstance(module, GPT | GPTStage)
            for buffer in module._non_persistent_buffers_set
        }
        if lost:
            raise LanewayError(f"to_empty would leave {', '.join(sorted(lost))} without values: no state dict has them")
        super().to_empty(device=device, recurse=recurse)
        for module in self.modules():
            if isinstance(module, GPT | GPTStage):
                config = module.config
                module.rotary = rotary_table(config.context, config.dim // config.heads, config.rope_base, device)
        return self

    def _counted(self) -> list[nn.Parameter]:
        """Parameters whose gradients enter the norm on this rank."""
        return list(self.parameters())

    def _undecayed(self) -> set[int]:
        """Identities of parameters without weight decay besides those that never have it."""
        return set()

    def _micro_batches(self, inputs: Tensor, targets: Tensor) -> list[tuple[Tensor, Tensor]]:
        rows, each = len(inputs), self.layout.micro_batch
        if rows != len(targets) or rows == 0 or rows % each:
            raise InputError(
                "batch", [rows, len(targets)], f"inputs and targets of as many rows, a multiple of micro_batch = {each}"
            )
        inputs, targets = inputs.to(self.device), targets.to(self.device)
        return list(zip(inputs.split(each), targets.split(each), strict=True))

    def _mean(self, loss: Tensor) -> Tensor:
        """Mean over the data-parallel ranks."""
        if self.mesh is not None:
            for axis in ("dp_shard", "dp_replicate"):
                if self.mesh[axis].size() > 1:
                    dist.all_reduce(loss, group=self.mesh.get_group(axis))
        return loss / self.data_ranks
