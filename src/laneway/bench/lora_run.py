"""One fine-tune with adapters, as a plain script would do it, with a place for a mistake at every stage.

    base loaded → check recorded → (compared with the pretraining's record) → adapters added or loaded → begin
    → each step: batch, forward and backward, gradients checked, clip, update, check where due → validation where due

The check only records, so that a run goes on and its loss can show the mistake too.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from laneway.connections.consistency import ConsistencyCheck, ConsistencyError, Finding
from laneway.connections.lora import add_lora, load_lora_state_dict, lora_state_dict
from laneway.data.loader import BatchLoader, evaluation_batches
from laneway.models.gpt import GPT

IGNORED = -100  # the target that does not count
LINEAR = ("attention.qkv", "attention.out", "ffn.gate_up", "ffn.out")


@dataclass(frozen=True)
class Setting:
    """What a fine-tune is like: the same for all but what a case changes."""

    targets: tuple[str, ...] = LINEAR
    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    lr: float = 2e-3
    decay: float = 0.0
    steps: int = 30
    every: int = 5
    context: int = 64
    batch_size: int = 8
    validation_batches: int = 4


@dataclass(frozen=True)
class Case:
    """A fine-tune: healthy where no stage has a mistake.

    Every stage is a function of the run (``base``: of the model alone). ``resumes``: it goes on from the adapter that the healthy
    case of this name left; ``record``: with the record of the check that watched its training.
    """

    name: str
    what: str
    held_out: bool = False
    resumes: str = ""
    record: bool = True
    like: str = "default"
    """The healthy case whose losses this one's are compared with."""
    changes: dict[str, Any] = field(default_factory=dict)
    base: Callable[[GPT], None] | None = None
    add: Callable[[Run], None] | None = None
    added: Callable[[Run], None] | None = None
    load: Callable[[Run, dict[str, Tensor]], None] | None = None
    optimizer: Callable[[Run], torch.optim.Optimizer] | None = None
    step: Callable[[Run, int], None] | None = None
    batch: Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    loss: Callable[[Tensor], Tensor] | None = None
    zero: bool = True
    """Whether gradients are cleared after an update."""


@dataclass(frozen=True)
class Trained:
    """An adapter and the state of the check that watched its training."""

    adapter: dict[str, Tensor]
    record: dict[str, Any]


@dataclass
class Outcome:
    """What a run came to. ``losses``: validation loss by step; ``crash``: (step, message) of an exception."""

    losses: dict[int, float]
    findings: list[Finding]
    crash: tuple[int, str] | None
    figures: dict[str, float]
    check_ms: float
    step_ms: float
    trained: Trained | None


class Run:
    """One fine-tune.

    Args:
        case: what is done, and what is done wrong.
        pretrained: the base model, which is copied.
        reference: state of a check of the base, made by the process that trained it.
        tokens: training and validation bytes.
        seed: of the adapters and of the order of batches.
        setting: of the run, before the case's own changes.
        start: the adapter to go on from.
        keep: whether the trained adapter is wanted afterwards.
    """

    def __init__(
        self,
        case: Case,
        pretrained: GPT,
        reference: dict[str, Any],
        tokens: tuple[Any, Any],
        seed: int,
        setting: Setting,
        start: Trained | None = None,
        keep: bool = False,
    ) -> None:
        self.case, self.seed, self.tokens, self.start, self.keep = case, seed, tokens, start, keep
        self.setting = replace(setting, **case.changes)
        self.model, self.reference = copy.deepcopy(pretrained), reference
        self.check: ConsistencyCheck | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.peak: dict[str, float] = {}
        self._seconds: dict[str, list[float]] = {"check": [], "step": []}

    def go(self) -> Outcome:
        """All stages in order; an exception of the model ends the run and is what shows its mistake."""
        torch.manual_seed(self.seed)
        losses: dict[int, float] = {}
        step, crash, refused = 0, None, []
        try:
            self._begin()
            losses[0] = self.validate()
            for step in range(1, self.setting.steps + 1):
                self._step(step)
                if step == 1 or step % self.setting.every == 0:
                    losses[step] = self.validate()
        except ConsistencyError as error:  # the model can't run at all, so without a check its first forward would have raised
            refused, crash = error.findings, (0, str(error))
        except (TypeError, RuntimeError, ValueError) as error:
            crash = (step, f"{type(error).__name__}: {error}")
        check = self.check
        trained = None
        if self.keep and crash is None and check is not None:
            trained = Trained({k: v.clone() for k, v in lora_state_dict(self.model).items()}, check.state_dict())
        timing = {name: 1000 * sorted(values)[len(values) // 2] if values else math.nan for name, values in self._seconds.items()}
        findings = check.findings if check else refused
        return Outcome(losses, findings, crash, self.peak, timing["check"], timing["step"], trained)

    def validate(self) -> float:
        """Mean loss over the fixed validation batches, nats per token."""
        s, total, count = self.setting, 0.0, 0
        self.model.eval()
        with torch.no_grad():
            for inputs, targets in evaluation_batches(self.tokens[1], s.context, s.batch_size, s.validation_batches):
                total += F.cross_entropy(self.model(inputs).float().flatten(0, 1), targets.flatten(), reduction="sum").item()
                count += targets.numel()
        self.model.train()
        return total / count

    def _begin(self) -> None:
        case, s = self.case, self.setting
        if case.base:
            case.base(self.model)
        sample = next(iter(evaluation_batches(self.tokens[0], s.context, 2, 1)))[0]
        self.check = check = ConsistencyCheck(self.model, sample, "record", every=s.every, tokens=2 * s.context)
        check.load_state_dict(self.reference)
        if case.add:
            case.add(self)
        else:
            add_lora(self.model, s.targets, rank=s.rank, alpha=s.alpha, dropout=s.dropout)
        if self.start is not None:
            (case.load or (lambda run, state: load_lora_state_dict(run.model, state)))(self, self.start.adapter)
            if case.record:
                check.load_state_dict(self.start.record)
        if case.added:
            case.added(self)
        self._timed("check", lambda: check.begin(fresh=self.start is None))
        self.optimizer = case.optimizer(self) if case.optimizer else self.adam(self.trainable())
        self.loader = BatchLoader(self.tokens[0], s.context, s.batch_size, self.seed)

    def trainable(self) -> list[torch.nn.Parameter]:
        """Parameters that require gradients."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def adam(self, parameters: list[torch.nn.Parameter], **options: Any) -> torch.optim.Optimizer:
        """AdamW over parameters, by the setting."""
        return torch.optim.AdamW(parameters, lr=self.setting.lr, weight_decay=self.setting.decay, **options)

    def _step(self, step: int) -> None:
        case, check, optimizer = self.case, self.check, self.optimizer
        assert check is not None
        assert optimizer is not None
        if case.step:
            case.step(self, step)
        check.on_step_begin(step)
        started = time.perf_counter()
        inputs, targets = next(self.loader)
        if case.batch:
            inputs, targets = case.batch(step, inputs, targets)
        counts = (targets != IGNORED).float().flatten()
        nats = F.cross_entropy(self.model(inputs).float().flatten(0, 1), targets.clamp_min(0).flatten(), reduction="none")
        loss = (nats * counts).sum() / counts.sum()
        (case.loss(loss) if case.loss else loss).backward()
        trained = self.trainable()
        self._seconds["step"].append(time.perf_counter() - started)
        check.on_backward_end(step)
        torch.nn.utils.clip_grads_with_norm_(
            trained, 1.0, torch.nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None])
        )
        optimizer.step()
        if case.zero:
            optimizer.zero_grad()
            self.model.zero_grad()
        metrics: dict[str, Any] = {}
        due = step == 1 or step % self.setting.every == 0
        self._timed("check" if due else "", lambda: check.on_step_end(step, metrics))
        self.peak = {key: max(self.peak.get(key, 0.0), float(value)) for key, value in metrics.items()} or self.peak

    def _timed(self, name: str, work: Callable[[], Any]) -> None:
        started = time.perf_counter()
        work()
        if name:
            self._seconds[name].append(time.perf_counter() - started)
