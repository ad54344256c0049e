"""One native collective over all ranks: what small messages, and networks without a gap between levels, do best with."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laneway.cluster.reduce.exchange import all_gather_single, reduce_scatter_single
from laneway.cluster.reduce.groups import LevelGroups
from laneway.cluster.reduce.pieces import sum_type
from laneway.cluster.reduce.work import FLAT_LEVEL, Observer, ReductionError, Timing, Work

__all__ = ["Flat"]


class Flat:
    """Flat collectives over a group of all ranks, whose members may stand in another order than their numbers.

    Half-precision numbers are summed in fp32. Nothing is copied else.

    Args:
        groups: whose `flat` is used.
        observers: told of each collective; the list is looked at each time.
    """

    def __init__(self, groups: LevelGroups, observers: Sequence[Observer]) -> None:
        self.group, self.order, self.world = groups.flat, groups.places.order, groups.world
        self.observers = observers
        self.in_order = self.order == tuple(range(self.world))

    def all_reduce(self, numbers: Tensor, divisor: int, asynchronous: bool) -> Tensor | Work:
        """Sum `numbers` (1-D) in place, divided by `divisor`."""
        wide = numbers if numbers.dtype == sum_type(numbers.dtype) else numbers.to(torch.float32)
        if not asynchronous and not self.observers and wide is numbers:
            _guarded(lambda: dist.all_reduce(numbers, group=self.group))
            return numbers.div_(divisor) if divisor > 1 else numbers

        def finish() -> None:
            _divide(wide, divisor)
            if wide is not numbers:
                numbers.copy_(wide)

        nbytes = 2 * (self.world - 1) * wide.nbytes // self.world
        return self._run(lambda: dist.all_reduce(wide, group=self.group, async_op=True), numbers, finish, nbytes, asynchronous)

    def reduce_scatter(self, out: Tensor, given: Tensor, divisor: int, asynchronous: bool) -> Tensor | Work:
        """Sum row r of `given` (one a rank) into rank r's `out`."""
        wide = given.to(sum_type(given.dtype))
        if not self.in_order:
            wide = wide[list(self.order)]
        total = out if out.dtype == wide.dtype else torch.empty(out.shape, dtype=wide.dtype, device=out.device)

        def finish() -> None:
            _divide(total, divisor)
            if total is not out:
                out.copy_(total)

        nbytes = (self.world - 1) * total.nbytes
        call = lambda: reduce_scatter_single(total, wide.view(-1), group=self.group, async_op=True)  # noqa: E731
        return self._run(call, out, finish, nbytes, asynchronous)

    def all_gather(self, out: Tensor, given: Tensor, asynchronous: bool) -> Tensor | Work:
        """Rank r's `given` into row r of `out`."""
        rows = out if self.in_order else torch.empty_like(out)

        def finish() -> None:
            if rows is not out:
                out.index_copy_(0, torch.tensor(self.order, device=out.device), rows)

        nbytes = (self.world - 1) * given.nbytes
        call = lambda: all_gather_single(rows.view(-1), given, group=self.group, async_op=True)  # noqa: E731
        return self._run(call, out, finish, nbytes, asynchronous)

    def _run(
        self, call: Callable[[], Any], result: Tensor, finish: Callable[[], None], nbytes: int, asynchronous: bool
    ) -> Tensor | Work:
        started = time.perf_counter()
        native = _guarded(call)

        def complete() -> None:
            if self.observers:
                timing = Timing(FLAT_LEVEL, "flat", nbytes, time.perf_counter() - started, started)
                for observer in self.observers:
                    observer(timing)
            finish()

        if not asynchronous:
            _guarded(native.wait)
            complete()
            return result
        work = Work(result, 1, complete)
        native.get_future().add_done_callback(lambda future: work.piece_done(_error_of(future)))
        return work


def _divide(numbers: Tensor, divisor: int) -> None:
    if divisor > 1:
        numbers.div_(divisor)


def _error_of(future: Any) -> BaseException | None:
    try:
        future.wait()
    except Exception as error:  # noqa: BLE001 - whoever waits for the work gets it
        return _told(error)
    return None


def _guarded(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except RuntimeError as error:
        raise _told(error) from error


def _told(error: Exception) -> ReductionError:
    told = ReductionError(f"a collective over all ranks failed: {error}")
    told.__cause__ = error
    return told
