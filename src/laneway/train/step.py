"""One optimizer step: micro-batches forward and backward, one reduction of the scalars, clip, update."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from laneway.strategy.norms import local
from laneway.train.memory import RunMemory
from laneway.train.packed import SharedStatistics
from laneway.train.parallel import Parallel
from laneway.train.ranks import Ranks

LOSS, STOP, SQUARES = "train/loss", "train/stop", "train/gradient squares"


@dataclass(frozen=True)
class StepOutcome:
    """Scalars of one step, the same on every rank. ``loss``: nats per token; ``stop``: some rank was asked to stop."""

    loss: float
    grad_norm: float
    stop: bool

    @property
    def finite(self) -> bool:
        """Whether the parameters were updated."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


def token_loss(logits_btv: Tensor, targets_bt: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy in nats, in fp32 whatever the logits are."""
    return F.cross_entropy(logits_btv.float().flatten(0, 1), targets_bt.flatten(), reduction=reduction)


@dataclass
class Stepper:
    """Holds what every step needs.

    A rank's micro-batches and all ranks' shares are of one size, so the mean of means is the mean over all tokens: each
    micro-batch's loss is divided by their number, and DDP and FSDP2 average the gradients over the ranks.

    Besides gradients and parameters the ranks reduce one vector a step, ``shared``; others may add to it.
    """

    parallel: Parallel
    optimizer: torch.optim.Optimizer
    ranks: Ranks
    micro_batch_size: int
    clip_norm: float
    memory: RunMemory = field(default_factory=lambda: RunMemory(None))
    shared: SharedStatistics = field(init=False)

    def __post_init__(self) -> None:
        self.shared = SharedStatistics(self.parallel.device, self.ranks.rank, self.ranks.world_size)
        for name in (LOSS, STOP, *([SQUARES] if self.parallel.kind == "fsdp" else [])):
            self.shared.add(name)

    def __call__(
        self, batch: tuple[Tensor, Tensor], lr: float, stopping: bool, after_backward: Callable[[], None]
    ) -> StepOutcome:
        """Train on this rank's share ``(inputs_bt, targets_bt)`` of a batch; a step that is not finite changes nothing."""
        loss = self._backward(batch)
        after_backward()
        gradients = [p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = self._share(loss, gradients, stopping)
        outcome = self._agree(norm)
        if outcome.finite:
            if self.clip_norm:
                parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
                self.memory.repeat(lambda: clip_grads_with_norm_(parameters, self.clip_norm, norm))
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.memory.update(self.optimizer)
        self.optimizer.zero_grad(set_to_none=True)
        return outcome

    def _backward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Accumulate the gradients of all micro-batches; returns this rank's mean loss, on the device."""
        inputs, targets = (_onto(part, self.parallel.device).split(self.micro_batch_size) for part in batch)
        total = torch.zeros((), device=self.parallel.device)
        for index, (inputs_bt, targets_bt) in enumerate(zip(inputs, targets, strict=True)):

            def run(inputs_bt: Tensor = inputs_bt, targets_bt: Tensor = targets_bt) -> Tensor:
                with self.parallel.autocast():
                    logits_btv = self.parallel.call(inputs_bt)
                loss = token_loss(logits_btv, targets_bt) / len(inputs)
                loss.backward()
                return loss.detach()

            with self.parallel.accumulating(last=index == len(inputs) - 1):
                total += self.memory.attempt(run)
        self.memory.reduce(self.parallel.model)
        return total

    def _share(self, loss: Tensor, gradients: list[Tensor], stopping: bool) -> Tensor:
        """The one collective of the step; returns the norm of all gradients, on the device.

        Whole gradients are the same on every rank: their norm is taken while the collective runs. Of sharded ones every rank
        sends the squares of its own.
        """
        shared, sharded = self.shared, self.parallel.kind == "fsdp"
        shared.put(LOSS, loss / self.ranks.world_size)
        shared.put(STOP, float(stopping))
        if sharded:
            squares = self.memory.repeat(lambda: get_total_norm([local(grad) for grad in gradients]).square())
            shared.put(SQUARES, squares / self.parallel.copies)
        shared.start()
        norm = loss if sharded else self.memory.repeat(lambda: get_total_norm(gradients).to(loss))
        shared.finish()
        return shared.taken(SQUARES).sqrt()[0] if sharded else norm

    def _agree(self, norm: Tensor) -> StepOutcome:
        """One transfer to the host: all that a step has to wait for."""
        mean, stop, grad_norm = torch.cat([self.shared.taken(LOSS), self.shared.taken(STOP), norm[None]]).tolist()
        return StepOutcome(mean, grad_norm, stop > 0)


def _onto(tokens_bt: Tensor, device: torch.device) -> Tensor:
    """Copy to the device; from pinned memory and without waiting where the device allows it."""
    if device.type == "cuda":
        tokens_bt = tokens_bt.pin_memory()
    return tokens_bt.to(device, non_blocking=device.type == "cuda")
