"""The training loop. One step, in order:

    extensions begin → batch → forward and backward of each micro-batch → extensions see the gradients → one sum over the
    ranks: loss, stop requests, what extensions share → clip, update (or skip, if a number is not finite) → extensions end →
    probe and validate where due → metrics row → checkpoint where due

The loop holds a list of extensions and knows none by name. Whatever depends on a number or a signal is decided from values
that are the same on every rank, so all ranks take the same path.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from laneway.checkpoint import CheckpointStore, export
from laneway.checkpoint.atomic import explain
from laneway.cluster.recover import CutOffError, LostContactError
from laneway.core import Extension, InputError, LanewayError, SharesStatistics
from laneway.memory.oom import out_of_memory
from laneway.rundir import RunDirectory, append_event, event_row, replace_file
from laneway.strategy.norms import local
from laneway.train.config import TrainConfig
from laneway.train.controls import build_controls
from laneway.train.environment import describe_environment
from laneway.train.faults import NonfiniteGuard, StopRequest
from laneway.train.metrics import MetricsWriter, StepClock, peak_bytes, plain
from laneway.train.parallel import resolve
from laneway.train.patient import PatientRows
from laneway.train.place import disk_errors, run_folder
from laneway.train.progress import Display
from laneway.train.ranks import Ranks, ranks_of_run
from laneway.train.resume import check_same_run, load_state, save_state
from laneway.train.sample import NonfiniteLogitsError
from laneway.train.schedule import learning_rate
from laneway.train.settings import to_toml
from laneway.train.workbench import Workbench, build

if TYPE_CHECKING:
    from laneway.strategy.strategy import Strategy

EXPORT = "export"  # folder in the run directory
Batch = tuple[Tensor, Tensor]  # inputs and targets, both int64 [b, t]


@dataclass(frozen=True)
class TrainResult:
    """What a run came to. ``stopped``: the signal that ended it early; then there is no validation of the last step."""

    run: Path
    steps: int
    val_loss: float | None
    val_bits_per_byte: float | None
    seconds: float
    stopped: str | None = None


def train(
    config: TrainConfig,
    *,
    out: str | Path,
    resume: bool | None = False,
    spare: bool = False,
    extensions: Sequence[Extension] = (),
    on_batch: Callable[[int, Batch], Batch] | None = None,
    console: str | None = "stdout",
    plan: Strategy | None = None,
) -> TrainResult:
    """Train as ``config`` says and leave a run directory behind. Seeds the global generators of python, numpy and torch.

    Under torchrun every rank calls it alike. SIGTERM and SIGINT end it after the current step with a checkpoint.

    Args:
        config: the whole run.
        out: the run directory.
        resume: go on from the newest good checkpoint in ``out``; None: if there is a run, else start one.
        spare: where ``out`` holds a run already, take ``out-2``, ``out-3``, … instead of raising.
        extensions: take part in every step, in this order and before the controls of ``config.control``, on every rank.
        on_batch: given the step and this rank's inputs and targets [b, t], what is trained on instead, such as shorter sequences;
            for an exact resume it must depend on nothing else, and all ranks need the same shape.
        console: where progress goes: ``stdout``, ``stderr`` or None.
        plan: what ``config`` was planned by; the run directory keeps it, the report draws it.

    Raises:
        InputError: a field is wrong, the folder is taken, or the run in it was made with another configuration.
        LanewayError: too many steps in a row were not finite; the last good checkpoint is kept.
        LostContactError: with ``failure_timeout``, a rank was lost. Only ``recover.leave`` surely ends the process then; one
            that is stuck in a collective is ended here.
    """
    started = time.perf_counter()
    if config.model.logit_cap is None:  # TOML has no null, and config.toml must give the same run again
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, logit_cap=0.0))
    with StopRequest().listening() as stop, ranks_of_run(config.device, config.failure_timeout) as ranks:
        config.check(ranks.world_size)
        resolve(config.parallel, ranks.world_size)
        display = Display(config.steps, enabled=ranks.first and console is not None, to_stderr=console == "stderr")
        patience = 2 * config.failure_timeout  # a rank 0 that lost contact on another host may hold the folder so long
        with disk_errors(Path(out)), run_folder(ranks, Path(out), resume, spare, patience) as (run, going_on):
            layout = ranks.together(lambda: check_same_run(run, config, ranks.world_size) if going_on else [])
            # In one expression: no name here keeps the model alive when the processes part.
            return _Training(
                config, run, ranks, build(config, ranks), list(extensions), on_batch, display, stop, started, plan
            ).run(going_on, layout)


class _Training:
    """The state of one call of ``train``."""

    def __init__(
        self,
        config: TrainConfig,
        run: RunDirectory,
        ranks: Ranks,
        bench: Workbench,
        extensions: list[Extension],
        on_batch: Callable[[int, Batch], Batch] | None,
        display: Display,
        stop: StopRequest,
        started: float,
        plan: Strategy | None,
    ) -> None:
        self.config, self.folder, self.ranks, self.bench = config, run, ranks, bench
        self.extensions = [*extensions, *build_controls(config.control, bench.parallel, config.steps, self._event)]
        if bench.parallel.reduction is not None:
            self.extensions += bench.parallel.reduction.extensions(self._event)
        self.on_batch, self.display, self.stop = on_batch, display, stop
        self.started, self.plan = started, plan
        self.store = CheckpointStore(run, config.keep_checkpoints)
        self.guard = NonfiniteGuard(config.max_nonfinite)
        self.clock = StepClock()
        patient = config.max_failed_checkpoints > 0
        self.writer, self.events = MetricsWriter(run.metrics(ranks.rank), patient), PatientRows(run.events, patient)
        self.done = self.unsaved = 0
        self.disk_full = False
        if ranks.contact is not None:
            ranks.contact.note = self._lost
        self.saved: int | None = None
        self.val_loss: float | None = None

    def run(self, resume: bool, layout: list[str]) -> TrainResult:
        """Begin or resume (with other values of the fields in ``layout``), loop, finish."""
        with self.bench.parallel.at_work():
            return self._run(resume, layout)

    def _run(self, resume: bool, layout: list[str]) -> TrainResult:
        self._begin(resume)
        if layout:
            self._notice(f"{', '.join(layout)} changed: the run goes on equal to rounding, not bit for bit")
        described = self.folder.memory if self.ranks.first else None
        with self.display.running(self.done), self.bench.memory.on(described):
            while self.done < self.config.steps:
                with self._told_of_missing_memory():
                    stopped = self._step(self.done + 1)
                if stopped:
                    return self._stopped()
        return self._finish()

    # -- the parts of a run, in order

    def _begin(self, resume: bool) -> None:
        for extension in self.extensions:
            if isinstance(extension, SharesStatistics):
                extension.share(self.bench.stepper.shared)
        self.bench.stepper.shared.seal()
        if resume:
            self.saved = self.store.latest_step()
            if self.saved is None and self.store.steps():
                why = f"every checkpoint in {self.folder.checkpoints} is damaged (events.jsonl says how)"
                raise LanewayError(f"resume: {why}; start a new run with another --out")
        if self.saved is not None:
            load_state(self.store, self.saved, self.bench, self.extensions)
            self.done = self.saved
        self.ranks.on_first(self._write_description)
        kind = "resume" if resume else "start"
        world, device = self.ranks.world_size, self.ranks.device.type
        self._event(kind, steps=self.config.steps, parameters=self.bench.parameters, world_size=world, device=device)
        if resume and self.saved is None:
            self._notice("no checkpoint to resume from: the run begins anew")
        text = f"{self.bench.parameters / 1e6:.2f} M parameters, {self.bench.parallel.kind} on {world} × {device}"
        self.display.say(f"{'resuming' if resume else 'training'} in {self.folder.path} at step {self.done}: {text}")

    def _write_description(self) -> None:
        """Beside the old file, then in its place: a resume that finds the disk full must not cost the run its configuration."""
        described = {
            self.folder.config: to_toml(self.config),
            self.folder.env: json.dumps(describe_environment(self.ranks), indent=1),
        }
        if self.plan is not None:
            described[self.folder.plan] = json.dumps(self.plan.to_dict(), indent=1)
        for path, text in described.items():
            try:
                replace_file(path, text.encode())
            except OSError as error:
                raise LanewayError(explain(error, self.folder.path)) from error

    def _step(self, step: int) -> bool:
        """One optimizer step and what is due after it; returns whether the run was asked to stop."""
        config = self.config
        with self.clock.step():
            for extension in self.extensions:
                extension.on_step_begin(step)
            batch = next(self.bench.loader)
            if self.on_batch is not None:
                batch = self.on_batch(step, batch)
            self.clock.count(batch[0].numel() * self.ranks.world_size)
            lr = learning_rate(config.optimizer, step, config.steps)
            outcome = self.bench.stepper(batch, lr, self.stop.name is not None, lambda: self._after_backward(step))
        row: dict[str, Any] = {"loss": outcome.loss, "bits_per_byte": self._bits(outcome.loss, "train"), "lr": lr}
        row |= {"grad_norm": outcome.grad_norm}
        self.done = step
        self.guard.see(outcome.finite)
        if not outcome.finite:
            row["skipped"] = 1
            self._event("nonfinite", loss=plain(outcome.loss), grad_norm=plain(outcome.grad_norm), in_a_row=self.guard.in_a_row)
        for extension in self.extensions:
            extension.on_step_end(step, row)
        if survived := self.bench.memory.survived():
            self._event("survived", **survived)
        self._look(step, batch[0], row)
        if self.guard.exhausted:
            error = self.guard.error(step, self.saved)
            self._event("stop", reason=str(error))
            raise error
        if outcome.stop:
            self._save_if_finite()
        elif _due(step, config.checkpoint_every) and step < config.steps and self.guard.healthy:
            self._save_or_go_on()  # not after a skipped step: what led to it may sit in the state, and older ones must stay
        return outcome.stop

    @contextmanager
    def _told_of_missing_memory(self) -> Generator[None]:
        """A step that ends the run for lack of memory leaves an event that says so."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if out_of_memory(error):
                self.done += 1
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                told = {"reason": f"out of memory: {reason}"[:300], "peak_bytes": peak_bytes(self.ranks.device)}
                if self.ranks.first:
                    self._event("stop", **told)
                elif self.folder.config.is_file():  # the others do not know of it
                    append_event(self.folder, "stop", self.done, rank=self.ranks.rank, **told)
            raise

    def _after_backward(self, step: int) -> None:
        for extension in self.extensions:
            extension.on_backward_end(step)

    def _look(self, step: int, inputs_bt: Any, row: dict[str, Any]) -> None:
        """Probe, validate, write the row and a short sample, where each is due."""
        config = self.config
        probing = config.probe_every > 0 and (step == 1 or _due(step, config.probe_every) or step == config.steps)
        validating = _due(step, config.validate_every) or step == config.steps
        if probing:
            row |= self.bench.evaluator.probe(inputs_bt)
        if validating:
            row |= self._validation_row(self._validate())
        if probing or validating or _due(step, config.log_every):
            row |= self.clock.take() | {"peak_bytes": peak_bytes(self.ranks.device)}
            row |= self.bench.memory.row() | self.bench.parallel.row()
            self.writer.write(step, row)
        self._tell_of_a_full_disk()
        self.display.step(step, row)
        if validating and step < config.steps:
            self._sample(config.sample_tokens // 4)

    def _stopped(self) -> TrainResult:
        name = self.ranks.on_first(lambda: self.stop.name) or self.stop.name or "a signal on another rank"
        self._event("signal", signal=name)
        kept = "" if self.saved == self.done else f" (not saved: a parameter is not finite; newest checkpoint: {self.saved})"
        again = f"laneway train --resume --out {self.folder.path}"
        self.display.say(f"{name}: stopped after step {self.done}{kept}; go on with `{again}`")
        return TrainResult(self.folder.path, self.done, None, None, self._seconds(), name)

    def _finish(self) -> TrainResult:
        """Validation if the last step's is missing, final checkpoint, sample, export."""
        val_loss = self.val_loss
        if val_loss is None:
            val_loss = self._validate()
            if self.done == 0:
                self.writer.write(0, self._validation_row(val_loss))
        if not math.isfinite(val_loss):
            kept = "no checkpoint had been written" if self.saved is None else f"the checkpoint of step {self.saved} is kept"
            error = LanewayError(f"the run ended with a validation loss of {val_loss}: nothing is exported; {kept}")
            self._event("stop", reason=str(error))
            raise error
        if self.saved != self.done:
            self._save()
        self._sample(self.config.sample_tokens)
        vocabulary = self.config.data.tokenizer
        described = {"architecture": "laneway GPT", "model": dataclasses.asdict(self.config.model)}
        if self.config.control.shapes_model:
            described["control"] = dataclasses.asdict(self.config.control)
        export(self.bench.parallel.model, described, self.folder.path / EXPORT, None if vocabulary == "byte" else vocabulary)
        bits = self._bits(val_loss, "validation")
        self._event("finish", val_loss=plain(val_loss), val_bits_per_byte=plain(bits), seconds=self._seconds())
        for rows in (self.writer.rows, self.events):
            rows.flush()
        return TrainResult(self.folder.path, self.done, val_loss, bits, self._seconds())

    # -- small helpers

    def _validate(self) -> float:
        self.val_loss = self.bench.evaluator.validation_loss()
        return self.val_loss

    def _validation_row(self, val_loss: float) -> dict[str, float]:
        return {"val_loss": val_loss, "val_bits_per_byte": self._bits(val_loss, "validation")}

    def _sample(self, tokens: int) -> None:
        if not tokens:
            return
        try:
            text = self.bench.evaluator.sample(tokens)
        except NonfiniteLogitsError as error:  # on every rank alike: they hold the same weights
            self._event("notice", message=f"no sample: {error}")
            return
        if text is not None:
            self._event("sample", prompt=self.config.sample_prompt, text=text)

    def _save(self) -> None:
        start = time.perf_counter()
        save_state(self.store, self.done, self.bench, self.extensions)
        self.saved = self.done
        self._event("checkpoint", seconds=time.perf_counter() - start)

    def _save_or_go_on(self) -> None:
        """The checkpoint of an interval; where it can't be written, the run goes on with the older ones until the next is due.

        Saving fails on all ranks where it fails on one, so they count alike. Where a rank is gone there is no going on.
        """
        try:
            self._save()
        except InputError:
            raise
        except LanewayError as error:
            lost = isinstance(error.__cause__, RuntimeError)
            if lost or self.unsaved >= self.config.max_failed_checkpoints:
                raise
            self.unsaved += 1
            kept = "no checkpoint yet" if self.saved is None else f"the newest is that of step {self.saved}"
            self._event("checkpoint_failed", reason=str(error), in_a_row=self.unsaved, newest=self.saved)
            self.display.say(f"{error}; {kept}; tried again in {self.config.checkpoint_every} steps")
        else:
            self.unsaved = 0

    def _tell_of_a_full_disk(self) -> None:
        full = bool(self.writer.rows.waiting or self.events.waiting)
        if full and not self.disk_full:
            self._notice(f"no space left on the disk of {self.folder.path}: metrics and events wait for room")
        self.disk_full = full

    def _save_if_finite(self) -> None:
        """Save what a stop request would lose: a skipped step leaves parameters as they were, so they count, not the step."""
        here = [torch.isfinite(local(p)).all() for p in self.bench.parallel.model.parameters()]
        finite = torch.stack(here).all().float().reshape(1).to(self.ranks.device)
        if self.ranks.sum(finite).item() == self.ranks.world_size:
            self._save()

    def _bits(self, nats_per_token: float, split: str) -> float:
        return self.bench.corpus.bits_per_byte(nats_per_token, split)

    def _event(self, kind: str, **fields: Any) -> None:
        if self.ranks.first:
            self.events.append(event_row(kind, self.done, **fields))

    def _lost(self, failure: LostContactError) -> None:
        """Called on one of the ranks that are left, from another thread."""
        if not isinstance(failure, CutOffError):  # the others write this file then
            append_event(self.folder, "lost", self.done, ranks=[lost.rank for lost in failure.lost], reason=str(failure))

    def _notice(self, message: str) -> None:
        self._event("notice", message=message)
        self.display.say(message)

    def _seconds(self) -> float:
        return time.perf_counter() - self.started


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
