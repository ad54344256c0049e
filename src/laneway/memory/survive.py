"""A micro-batch that runs out of memory happens all the same, once: bit for bit as if it had fitted.

Three levels, each for what the one before it could not do:

1. An op whose allocation fails sends saved tensors out and runs again (``retry.RetryOps``).
2. The micro-batch is undone and run again: its gradients are discarded, buffers and generators put back, its graph dropped,
   everything that can leave the device sent out, its plan made for less memory.
3. The micro-batch is run in parts, where the caller offers them (equal up to rounding, no longer bit for bit).
"""

from __future__ import annotations

import functools
import operator
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from laneway.core import InputError, choice, positive_int
from laneway.memory.exact_step import step_exactly
from laneway.memory.manager import MemoryManager
from laneway.memory.micro_batch import Accumulated, Before, Buffers, leaves
from laneway.memory.oom import Failure, free_caches, free_unused, out_of_memory
from laneway.memory.refusal import cannot_repeat, does_not_fit, is_sharded, refuse_communication
from laneway.memory.retry import RetryOps

T = TypeVar("T")
Parts = Callable[[int], Sequence[Callable[[], T]]]

CALM, CALM_IF_TIGHT = 64, 8  # micro-batches without a failure, or within the budget, until ops are no longer watched
OP_RETRY = ("auto", "always", "never")


@dataclass(frozen=True)
class SurvivalEvent:
    """Something that was survived.

    Attributes:
        kind: ``op_retry``, ``replay`` or ``split``.
        bytes: what the failed allocation asked for; 0: unknown.
        where: the op, or the function that was running.
        seconds: from the beginning of the lost try (of an op: from its failure) until it could go on.
    """

    kind: str
    bytes: int
    where: str
    seconds: float


@dataclass
class _Outcome(Generic[T]):
    value: T


class Survivor:
    """Runs micro-batches and optimizer steps so that a failed allocation in them is not the end.

    With several ranks, ``agree`` tells all of them after each try whether one of them failed; then all repeat it. That needs
    micro-batches without communication: under DDP they run under ``no_sync`` and the caller averages with ``reduce_gradients``
    afterwards. FSDP2 communicates within forward and backward: there only level 1 works, always on, and what it can't mend ends
    the run with an error that says so.

    Args:
        manager: of the model, entered by the caller; None: nothing can be sent out.
        model: whose gradients and buffers a micro-batch changes; bare, in DDP, or sharded by FSDP2.
        device: of the model.
        generators: that a micro-batch draws from, beside torch's default ones.
        split: level 3 is allowed (a call of ``attempt`` then gives the parts).
        attempts: how often a micro-batch is run at most before it is split or given up.
        agree: with several ranks: ``reduce.Agreement``; told whether this rank failed, says whether any did.
        op_retry: level 1 ``always``, ``never``, or ``auto``: for a while after a failure, and while the manager's last plan does
            not fit the budget; it costs tens of microseconds an op.

    Attributes:
        events: what was survived, the last 4096.
        counts: how often, by kind.

    Raises:
        InputError: ``attempts`` or ``op_retry``; ``split`` under FSDP2.
        LanewayError: DDP without ``agree``; or with ``agree`` a model that communicates in its forward pass (DDP that broadcasts
            buffers, SyncBatchNorm).
    """

    def __init__(
        self,
        manager: MemoryManager | None,
        model: nn.Module,
        *,
        device: torch.device,
        generators: Iterable[torch.Generator] = (),
        split: bool = False,
        attempts: int = 3,
        agree: Callable[[bool], bool] | None = None,
        op_retry: str = "auto",
    ) -> None:
        self.manager, self.model, self.device, self.generators = manager, model, device, list(generators)
        self.attempts = positive_int("attempts", attempts)
        self.op_retry = choice("op_retry", op_retry, OP_RETRY)
        self.split, self.agree = split, agree
        self.events: deque[SurvivalEvent] = deque(maxlen=4096)
        self.counts: Counter[str] = Counter()
        self.sharded = is_sharded(model)
        if self.sharded and split:
            raise InputError("split", split, "False for a model that FSDP2 sharded: its micro-batches can't be run again")
        refuse_communication(model, agree is not None)
        self._buffers = Buffers(model)
        self._watchful = 0  # micro-batches to come for which ops are watched
        self._parts = 0  # into how many the last micro-batch was split, 0: whole; the same on every rank

    # -- micro-batches

    def attempt(
        self, run: Callable[[], T], *, parts: Parts[T] | None = None, combine: Callable[[Sequence[T]], T] | None = None
    ) -> T:
        """Forward and backward of one micro-batch, whatever memory there is.

        Args:
            run: does both, with one call of ``backward``, and returns what the caller wants of it (the loss, detached). It may be
                run several times, so all it changes is gradients, buffers and generators; it leaves no graph behind in variables
                outside it.
            parts: for level 3: given n = 2, 4, 8, …, the micro-batch as n callables like ``run`` (fewer where it can't be cut so
                far), each with its share of the loss.
            combine: what ``run`` would have returned, of what the parts returned; default: their sum.

        Returns:
            What ``run`` returned.

        Raises:
            LanewayError: it does not fit. Gradients, buffers and generators are as they were before.
            torch.OutOfMemoryError: it fitted, but earlier gradients that had left the device have no room any more: all are None.
        """
        if parts is not None and not self.split:
            raise InputError("parts", parts, "None, unless split is on")
        if self.sharded:
            return self._without_replay(run)
        if self.manager is not None and not self.manager.activations.alive:
            self.manager.end_pass()  # the pass before: its peak is known now, and a failure is not its fault
        before, held = Before(self._buffers, self.device, self.generators), Accumulated(leaves(self.model))
        try:
            value = self._until_it_fits(self._tries(run, parts, combine), before, held)
            self._in_peace(held.add_new)
        except BaseException:
            held.put_back()
            raise
        self._buffers.passed()
        return value

    def _tries(
        self, run: Callable[[], T], parts: Parts[T] | None, combine: Callable[[Sequence[T]], T] | None
    ) -> Generator[tuple[int, Callable[[], T]]]:
        """What to try, one after the other, and in how many parts (0: whole). The same sequence on every rank."""
        for _ in range(1 if self._parts else self.attempts):
            yield 0, run
        if parts is None:
            return
        before, count = 1, self._parts or 2
        while True:
            pieces = self._in_peace(functools.partial(parts, count))
            if self._anywhere(len(pieces) <= before):
                return
            yield count, _in_parts(pieces, combine or _sum)
            before, count = len(pieces), count * 2

    def _until_it_fits(self, tries: Iterable[tuple[int, Callable[[], T]]], before: Before, held: Accumulated) -> T:
        failure: Failure | None = None
        done, began = 0, time.perf_counter()
        for count, run in tries:
            if done:
                self._note("split" if count else "replay", failure, began)
            began, done = time.perf_counter(), done + 1
            outcome, failure = self._try(run, before)
            if not self._anywhere(failure is not None):
                assert outcome is not None
                self._parts = count
                return outcome.value
            outcome = None  # of a rank that had room
            self._recover(held)
        before.restore()
        budget = None if self.manager is None else self.manager.budget
        raise does_not_fit(done, failure, budget, self.split) from (failure.error if failure is not None else None)

    def _try(self, run: Callable[[], T], before: Before) -> tuple[_Outcome[T] | None, Failure | None]:
        try:
            with self._around():
                before.take_or_restore()
                return _Outcome(run()), None
        except Exception as error:
            if not out_of_memory(error):
                raise
            failure = Failure.of(error)
        return None, failure

    def _recover(self, held: Accumulated) -> None:
        """The error is gone: now let go of all that it held, and make room."""
        held.drop_new()
        manager, self._watchful = self.manager, CALM
        signature = manager.abandon_pass() if manager is not None else None
        free_unused(self.device)
        if manager is not None and signature is not None:
            manager.tighten(signature)
        self._evict(1 << 62)
        held.park(manager.tier if manager is not None else None)
        free_caches(self.device)

    def _without_replay(self, run: Callable[[], T]) -> T:
        try:
            with self._around():
                return run()
        except Exception as error:
            if not out_of_memory(error):
                raise
            failure = Failure.of(error)
        raise cannot_repeat(failure) from failure.error

    # -- optimizer steps and the rest

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """``optimizer.step()``, with failed allocations survived: see ``exact_step.step_exactly``.

        Where the manager streams the optimizer's state, ops alone are tried again: the step goes by chunks of its own.

        Raises:
            LanewayError: it does not fit; the text says whether parameters were changed.
        """
        if self.manager is not None and self.manager.optimizer_state is not None:
            with self._ops():
                optimizer.step()
            return

        def again(failure: Failure, began: float) -> None:
            self._watchful = CALM
            self._make_room()
            self._note("replay", failure, began, "optimizer.step, ")

        step_exactly(optimizer, again, attempts=self.attempts)

    def repeat(self, run: Callable[[], T]) -> T:
        """What ``run`` returns; run again where memory was missing. ``run`` must change nothing before its last allocation.

        For norms and clipping. Nothing that communicates: other ranks would not repeat it.
        """
        return self._in_peace(run)

    def _in_peace(self, run: Callable[[], T]) -> T:
        for attempt in range(1, self.attempts + 1):
            began = time.perf_counter()
            try:
                return run()
            except Exception as error:
                if attempt == self.attempts or not out_of_memory(error):
                    raise
                failure = Failure.of(error)
            self._make_room()
            self._note("replay", failure, began)
        raise AssertionError

    # -- small parts

    @contextmanager
    def _around(self) -> Generator[None]:
        """What a micro-batch runs in: no collectives, and ops watched where that is due."""
        tight = self._tight()
        watched = self.op_retry == "always" or (self.op_retry == "auto" and (self.sharded or self._watchful > 0 or tight))
        self._watchful = max(self._watchful - 1, CALM_IF_TIGHT if tight else 0)
        with ExitStack() as stack:
            if self.agree is not None and isinstance(self.model, DistributedDataParallel):
                stack.enter_context(self.model.no_sync())
            if watched:
                stack.enter_context(self._ops())
            yield

    def _ops(self) -> RetryOps:
        return RetryOps(self._evict, device=self.device, free=lambda: free_unused(self.device), told=self._op_came_through)

    def _tight(self) -> bool:
        """Whether the manager's last pass, or its newest plan, was over the budget."""
        manager = self.manager
        if manager is None:
            return False
        newest = next(reversed(manager.plans.values()), None)
        last = manager.passes[-1] if manager.passes else None
        return (newest is not None and not newest.feasible) or (last is not None and last.peak > manager.budget)

    def _evict(self, nbytes: int) -> int:
        """Send saved tensors out; returns the bytes that left. Nothing where the books are in the middle of something."""
        return 0 if self.manager is None else self.manager.activations.books.evict_if_idle(nbytes)

    def _make_room(self) -> None:
        free_unused(self.device)
        self._evict(1 << 62)
        free_caches(self.device)

    def _anywhere(self, here: bool) -> bool:
        return here if self.agree is None else self.agree(here)

    def _op_came_through(self, op: str, wanted: int, seconds: float) -> None:
        self._watchful = CALM
        self.counts["op_retry"] += 1
        self.events.append(SurvivalEvent("op_retry", wanted, op, seconds))

    def _note(self, kind: str, failure: Failure | None, began: float, place: str = "") -> None:
        where = place + failure.where if failure is not None else "another rank"
        self.counts[kind] += 1
        wanted = failure.wanted if failure is not None else 0
        self.events.append(SurvivalEvent(kind, wanted, where, time.perf_counter() - began))


def _in_parts(pieces: Sequence[Callable[[], T]], combine: Callable[[Sequence[T]], T]) -> Callable[[], T]:
    return lambda: combine([piece() for piece in pieces])


def _sum(values: Sequence[T]) -> T:
    return functools.reduce(operator.add, values)  # pyrefly: ignore
