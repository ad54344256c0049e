"""What ``wrap_model`` gives back for pp > 1: this rank's stages, and the schedule that runs micro-batches through all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from laneway.cluster.layout import Layout
from laneway.core import InputError, LanewayError
from laneway.strategy.base import LossFn, Wrapped, next_token_loss
from laneway.strategy.norms import local
from laneway.strategy.stages import GPTStage

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

__all__ = ["SCHEDULES", "PipelinedModel"]

SCHEDULES = ("1f1b", "gpipe")


class PipelinedModel(Wrapped):
    """The stages of a pipeline that lie on this rank; trains by ``step`` alone.

    With ``layout.chunks`` > 1, stage ``chunk · pp + rank`` is on pipeline rank ``rank``, and the schedule is interleaved 1F1B.

    Args:
        stages: this rank's, with everything applied that changes them in place.
        calls: what a forward pass of each calls: the stage, or DDP around it.
        layout, mesh, device: see ``Wrapped``.
        schedule: ``1f1b`` or ``gpipe``.
    """

    def __init__(
        self,
        stages: list[GPTStage],
        calls: list[nn.Module],
        layout: Layout,
        mesh: DeviceMesh,
        device: torch.device,
        schedule: str = "1f1b",
    ) -> None:
        super().__init__(layout, mesh, device)
        self.stages = nn.ModuleList(stages)
        self._calls, self.schedule = tuple(calls), schedule
        self._ready: dict[tuple[int, int], Any] = {}
        self._loss_fn: LossFn = next_token_loss
        self._parts = 1

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """A stage alone is no model: raises LanewayError."""
        raise LanewayError("layout.pp > 1: the model is cut into stages; train with loss = model.step(inputs, targets)")

    def step(self, inputs: Tensor, targets: Tensor, loss_fn: LossFn = next_token_loss) -> Tensor:
        """Forward and backward of this data rank's share of a batch, as ``WrappedModel.step``; all pp ranks are given the same.

        Raises:
            InputError: the rows are no multiple of micro_batch, or too few micro-batches for the schedule.
        """
        assert self.mesh is not None
        self._parts = len(self._micro_batches(inputs, targets))
        self._loss_fn = loss_fn
        inputs, targets = inputs.to(self.device), targets.to(self.device)
        first, last = any(stage.first for stage in self._own()), any(stage.last for stage in self._own())
        losses: list[Tensor] = []
        schedule = self._schedule(self._parts, inputs.shape[1])
        given = {"target": targets, "losses": losses} if last else {}
        schedule.step(*((inputs,) if first else ()), return_outputs=False, **given)
        self._exchange_tied()
        loss = torch.zeros((), device=self.device)
        for part in losses:
            loss += part.detach()
        ranks = dist.get_process_group_ranks(self.mesh.get_group("pp"))
        dist.broadcast(loss, src=ranks[-1], group=self.mesh.get_group("pp"))
        return self._mean(loss)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """This rank's part, by the whole model's names; split tensors stay split. A tied head is the first stage's embedding."""
        return {name: value for stage in self.stages for name, value in stage.state_dict(*args, **kwargs).items()}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Each stage takes its part of a state with the whole model's names."""
        for stage in self.stages:
            own = stage.state_dict()
            stage.load_state_dict({k: v for k, v in state_dict.items() if k in own}, strict=strict, assign=assign)

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Any:
        """This rank's, by the whole model's names."""
        for stage in self.stages:
            yield from stage.named_parameters(prefix, recurse, remove_duplicate)

    def _own(self) -> list[GPTStage]:
        return cast(list[GPTStage], list(self.stages))

    def _copies(self) -> list[Tensor]:
        """The last stage's copy of a tied head."""
        return [stage.head.weight for stage in self._own() if stage.tied and stage.last and stage.head is not None]

    def _undecayed(self) -> set[int]:
        return set(map(id, self._copies()))

    def _counted(self) -> list[nn.Parameter]:
        copies = self._undecayed()
        return [parameter for parameter in self.parameters() if id(parameter) not in copies]

    # -- schedule

    def _schedule(self, parts: int, time: int) -> Any:
        from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B  # imports the compiler

        pp, chunks, each = self.layout.pp, self.layout.chunks, self.layout.micro_batch
        if parts < pp or (chunks > 1 and parts % pp):
            rows = "a multiple of" if chunks > 1 else "at least"
            hint = f"{parts} micro-batches do not fill {pp} stages"
            raise InputError("batch", parts * each, f"{rows} pp × micro_batch = {pp * each} rows", hint)
        if (parts, time) not in self._ready:
            made = [self._stage(stage, call, time) for stage, call in zip(self._own(), self._calls, strict=True)]
            kind: Any = ScheduleInterleaved1F1B if chunks > 1 else ScheduleGPipe if self.schedule == "gpipe" else Schedule1F1B
            stages: Any = made if chunks > 1 else made[0]
            self._ready[parts, time] = kind(stages, parts, loss_fn=self._loss, scale_grads=False)
        return self._ready[parts, time]

    def _stage(self, stage: GPTStage, call: nn.Module, time: int) -> PipelineStage:
        from torch.distributed.pipelining import PipelineStage

        assert self.mesh is not None
        dtype = torch.bfloat16 if self.layout.precision == "bf16" else next(stage.parameters()).dtype
        split = self.layout.tp if self.layout.sequence_parallel else 1
        given, returned = stage.shapes(self.layout.micro_batch, time, dtype, split)
        return PipelineStage(
            call,
            stage.index,
            stage.stages,
            self.device,
            input_args=given,
            output_args=returned,
            group=self.mesh.get_group("pp"),
        )

    def _loss(self, output: Any, targets: Tensor) -> Tensor:
        return self._loss_fn(output, targets) / self._parts

    # -- the tied head

    def _exchange_tied(self) -> None:
        """Add the gradients of the embedding and of its copy in the head, on both."""
        assert self.mesh is not None
        group = self.mesh.get_group("pp")
        for stage in self._own():
            if not stage.tied:
                continue
            weight: Any = stage.embedding.weight if stage.embedding is not None else cast(Any, stage.head).weight
            if weight.grad is None:
                continue  # frozen, on both
            if isinstance(weight.grad, DTensor):  # DTensor leaves a gradient split as its op made it
                weight.grad = weight.grad.redistribute(placements=weight.placements)
            mine = local(weight.grad).contiguous()
            theirs, other = torch.empty_like(mine), self.layout.pp - 1 if stage.first else 0
            swap = [
                dist.P2POp(op, tensor, group=group, group_peer=other) for op, tensor in ((dist.isend, mine), (dist.irecv, theirs))
            ]
            for work in dist.batch_isend_irecv(swap):
                work.wait()
            local(weight.grad).add_(theirs)
