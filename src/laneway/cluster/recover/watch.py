"""Watching over the ranks of a run: one that dies, freezes or is cut off becomes one error on all others within a limit.

Each rank shows a sign of life in a store, from a thread of its own; some look at all signs. A rank that is lost is named by the
one that saw it, and all are told the same. Works with any backend and without privileges; collectives need not know of it.

A network that is cut in two leaves the store on one side: the other one gives up before this one calls it lost, so that never
two sides go on. The store belongs on a host whose loss ends the run anyway, or outside it: under torchrun it is the agent's.
"""

from __future__ import annotations

import functools
import math
import queue
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d

from laneway.cluster.recover.beat import Beat
from laneway.cluster.recover.board import Board, another
from laneway.cluster.recover.errors import (
    CollectiveFailedError,
    CutOffError,
    LostContactError,
    MinorityError,
    RankLostError,
    describe,
)
from laneway.cluster.recover.members import Member, address_towards
from laneway.cluster.recover.tether import Tether
from laneway.cluster.recover.verdict import Limits, Verdict
from laneway.cluster.recover.worker import Worker
from laneway.core import InputError, LanewayError

__all__ = ["Watch"]

T = TypeVar("T")


class Watch:
    """Made by all ranks together; a context manager.

    A sign comes from a Python thread: code that holds the interpreter's lock for as long as ``limit`` looks frozen.

    Args:
        store: a client for this watch alone (``another(store)``), under a prefix of its own.
        rank: this rank, below ``size``.
        size: number of ranks.
        limit: seconds without a sign after which a rank is lost. A process that is gone is noticed in a third of it.
        timeout: how long to wait for all ranks to come.

    Raises:
        InputError: ``limit`` is no number > 0.
        LanewayError: some ranks did not come.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, *, limit: float = 10.0, timeout: timedelta = timedelta(minutes=5)
    ) -> None:
        if isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 < limit < math.inf:
            raise InputError("limit", limit, "seconds > 0")
        self.store, self.limits, self.ident = store, Limits(float(limit)), rank
        self.endpoint = _endpoint(store)
        tether = Tether(address_towards(*self.endpoint))
        own = Member.own(rank, tether.socket.getsockname()[0], tether.port)
        board = Board(store, rank)
        try:
            self.members: tuple[Member, ...] = tuple(board.sign_in(own, size, timeout))
        except BaseException:
            tether.close()
            raise
        self._lock, self._failed, self._regrouped = threading.Lock(), threading.Event(), threading.Event()
        self._failure: LostContactError | None = None
        self._listeners: list[Callable[[LostContactError], None]] = []
        self._answers: queue.SimpleQueue[Any] | None = None
        self._worker: Worker | None = None
        self._closed = False
        self._beat = Beat(
            board, tether, self.limits, self.members, rank,
            on_verdict=self._told, on_break=self._broken, on_world=self._new_world,
        )  # fmt: skip
        self._beat.thread.start()
        threading.Thread(target=self._look_at_clock, name="laneway-clock", daemon=True).start()

    @classmethod
    def of_world(cls, *, limit: float = 10.0, timeout: timedelta = timedelta(minutes=5)) -> Watch:
        """Over all ranks of the default process group, by another connection to its store. Collective."""
        name = [uuid.uuid4().hex]
        dist.broadcast_object_list(name, src=0)
        store = dist.PrefixStore(f"laneway/watch/{name[0]}", another(distributed_c10d._get_default_store()))
        return cls(store, dist.get_rank(), dist.get_world_size(), limit=limit, timeout=timeout)

    # -- what is known

    @property
    def failure(self) -> LostContactError | None:
        """What all ranks were told, if anything."""
        return self._failure

    @property
    def generation(self) -> int:
        """How often the ranks have regrouped."""
        return self._beat.generation

    @property
    def rank(self) -> int:
        """This rank's place among the present members."""
        return [member.ident for member in self.members].index(self.ident)

    def check(self) -> None:
        """Raise what the ranks were told, if anything."""
        if self._failure is not None:
            raise self._failure

    def on_failure(self, listener: Callable[[LostContactError], None]) -> None:
        """Call ``listener`` once with what the ranks are told, from another thread; at once where they were told already."""
        with self._lock:
            self._listeners.append(listener)
            failure = self._failure
        if failure is not None:
            listener(failure)

    # -- running collectives

    def watched(self, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run ``call``, which may wait for other ranks, and return its result; where a rank is lost meanwhile, raise that.

        It runs in a thread of its own, which is left behind where it is stuck: gloo has no way to be interrupted. So what
        belongs to a thread (gradient mode, autocast, the current CUDA stream) must be set inside ``call``.

        Raises:
            LostContactError: contact was lost, on every rank the same.
            Exception: what ``call`` raised; the others are told where it is or comes from a RuntimeError.
        """
        self.check()
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        with self._lock:
            self._answers = answers
            self._worker = worker = self._worker or Worker()
        worker.give(functools.partial(call, *args, **kwargs), lambda result, error: answers.put((result, error)))
        if self._failure is not None:
            answers.put(None)
        answer = answers.get()
        with self._lock:
            self._answers = None
            if answer is None:
                self._worker = None
        if answer is None:
            worker.close()
            self.check()
        result, error = answer
        if error is None:
            return result
        found = self.explain(error) if _of_ranks(error) else error
        if found is error:
            raise error
        raise found from error

    def explain(self, error: Exception) -> Exception:
        """What ``error``, raised where ranks talk to each other, comes from: a rank that is lost, or this rank itself.

        Calls the roll, tells all ranks the outcome and returns it; ``error`` itself where everyone is there. At most about
        ``limit`` seconds.
        """
        if self._failure is None:
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            self._beat.report(f"{type(error).__name__}: {first}")
            self._failed.wait(3 * self.limits.limit)
        found = self._failure
        if found is None or (isinstance(found, CollectiveFailedError) and found.by.ident == self.ident):
            return error
        return found

    # -- going on

    def next_world(self, *, at_least: int | None = None, patience: float = 60.0) -> tuple[Member, ...]:
        """The members that go on, the same on all of them, with their new ranks; the watch goes on over these.

        All that are left call it, after they were told of a loss. Make new process groups then: see ``rebuild``.

        Args:
            at_least: fewest members to go on with; by default half of the present ones.
            patience: seconds to wait for those that are alive but have not called it; they are left out then.

        Raises:
            MinorityError: too few are left.
            LostContactError: this rank was left out, or the store is gone.
            LanewayError: there is nothing to regroup for.
        """
        told = self._failure
        if told is None:
            raise LanewayError("no rank was lost: there is nothing to regroup for")
        if isinstance(told, CutOffError | MinorityError) or self.ident in [member.ident for member in told.lost]:
            raise told
        least = -(-len(self.members) // 2) if at_least is None else at_least
        if len(self.members) - len(told.lost) < least:
            raise self._minority(len(self.members) - len(told.lost), least)
        self._regrouped.clear()
        self._failed.clear()
        former, self._failure = len(self.members), None
        self._beat.join_next(patience)
        while not self._regrouped.wait(self.limits.beat):
            self.check()
        self.check()
        if len(self.members) < least:
            self._failure = self._minority(len(self.members), least)
            raise self._failure
        assert len(self.members) <= former
        return self.members

    def close(self) -> None:
        """End the watch, on all ranks; waits for them for at most ``limit`` seconds."""
        self._closed = True
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        self._beat.leave()
        if self._failure is None:
            self._beat.thread.join(self.limits.limit)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, Exception) and not isinstance(error, LostContactError):
            found = self.explain(error)
            if found is not error:
                raise found from error
        if error is None or isinstance(error, LostContactError):
            self.close()

    # -- from the threads

    def _told(self, verdict: Verdict) -> None:
        size, by = len(self.members), self._member(verdict.by)
        if not verdict.lost:
            first = next((member.ident for member in self.members if member.ident != by.ident), by.ident)
            text = f"{describe([by], size)} failed: {verdict.why}"
            self._fail(CollectiveFailedError(text, by, speaks=self.ident == first))
            return
        lost = [self._member(ident) for ident in verdict.lost]
        left = [member.ident for member in self.members if member not in lost]
        if self.ident in verdict.lost:
            text = f"rank {self.rank} of {size} was given up by the others: {verdict.why}; it must stop"
            self._fail(RankLostError(text, lost))
            return
        text = f"lost {describe(lost, size)}: {verdict.why}; noticed by rank {by.rank}"
        self._fail(RankLostError(text, lost, speaks=self.ident == left[0]))

    def _broken(self, why: str, gone: Sequence[int] = ()) -> None:
        host, port = self.endpoint
        lost, size = [self._member(ident) for ident in gone], len(self.members)
        machine = self._member(self.ident).machine
        first = next(member.ident for member in self.members if member.machine == machine and member not in lost)
        also = f"; {describe(lost, size)}: process gone too" if lost else ""
        text = f"rank {self.rank} of {size} lost the store at {host}:{port}: {why}{also}; it must stop"
        self._fail(CutOffError(text, lost, speaks=self.ident == first))

    def _new_world(self, idents: list[int]) -> None:
        if self.ident in idents:
            known = {member.ident: member for member in self.members}
            self.members = tuple(known[ident].now(rank) for rank, ident in enumerate(idents))
        else:
            self._fail(RankLostError("this rank came too late and was left out when the others regrouped; it must stop"))
        self._regrouped.set()

    def _fail(self, failure: LostContactError) -> None:
        with self._lock:
            if self._failure is not None or self._closed:
                return
            self._failure = failure
            listeners, answers = list(self._listeners), self._answers
        self._failed.set()
        if answers is not None:
            answers.put(None)
        for listener in listeners:
            listener(failure)

    def _look_at_clock(self) -> None:
        """Where the store does not answer at all (a cut network sends no refusal) the other thread waits in it."""
        tick, contact, ticks = self.limits.beat / 2, self._beat.contact, 0
        while self._beat.thread.is_alive() and not self._closed:
            time.sleep(tick)
            ticks = ticks + 1 if contact == self._beat.contact else 0
            contact = self._beat.contact
            # Ticks too: where this whole process stood still, the other thread gets its turn first.
            if time.monotonic() - contact >= self.limits.fence and ticks * tick >= self.limits.fence / 2:
                self._broken(f"no answer for {self.limits.fence:g} s (its host is gone, or the network is cut)")
                return

    def _member(self, ident: int) -> Member:
        return next(member for member in self.members if member.ident == ident)

    def _minority(self, left: int, least: int) -> MinorityError:
        text = f"{left} of {len(self.members)} ranks are left, at least {least} must be: the others may go on without these"
        return MinorityError(text, self._failure.lost if self._failure else (), speaks=self.rank == 0)


def _of_ranks(error: BaseException) -> bool:
    """Whether an error may come from ranks that talk to each other: torch raises RuntimeErrors there, others wrap them."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, RuntimeError):
        found = found.__cause__
    return found is not None and isinstance(error, Exception)


def _endpoint(store: dist.Store) -> tuple[str, int]:
    """Host and port of a store's server; this machine's loopback where it has none."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, dist.TCPStore) else ("127.0.0.1", 0)
