"""A piece of a vector on its way over the levels, and back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from laneway.cluster.reduce.buffers import Pool
from laneway.cluster.reduce.legs import Leg
from laneway.cluster.reduce.plan import Plan
from laneway.cluster.reduce.rounds import Bounds
from laneway.cluster.reduce.wire import codec_for

__all__ = ["Dropper", "Gathered", "Reduced", "Scattered", "Step", "sum_type"]

Step = tuple[int, str, Callable[[], None]]
"""Level, phase ("up", "top", "down") and what to do there."""


class Dropper(Protocol):
    """Sums a part of a gradient over the outermost level and leaves out what matters least."""

    def all_reduce(self, shard: Tensor, group: dist.ProcessGroup, key: Any, *, drop: float, wire: str) -> object:
        """In place, bit for bit the same on all members.

        Args:
            shard: fp32, 1-D.
            group: of the outermost level.
            key: what the caller named, and the range of its elements that this is: (name, start, stop).
            drop, wire: the share that stays at home, and the format of the rest, as the scheme says.
        """


def sum_type(dtype: torch.dtype) -> torch.dtype:
    """What sums are taken in: fp64 for fp64, fp32 for all else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _pass_by() -> None:
    """At a stage that a piece has no business with."""


class Piece:
    """Numbers that go up the levels, each rank with an ever smaller part of them, and come down again.

    Args:
        plan: this rank's legs.
        numbers: 1-D, contiguous; reduced in place.
        pool: where buffers of the sum's type come from.
        divisor: what sums are divided by, once.
    """

    def __init__(self, plan: Plan, numbers: Tensor, pool: Pool, divisor: int) -> None:
        self.plan, self.numbers, self.pool, self.divisor = plan, numbers, pool, divisor
        self.top = len(plan.up) - 1
        self.inner = [level for level in range(self.top) if plan.up[level] is not None]
        self._borrowed: list[Tensor] = []
        self.sums: Tensor | None = None  # of this rank's span, once they aren't in `numbers`

    def lay_out(self, length: int, levels: int) -> None:
        """This rank's span of the vector at each level, and the parts of that level's members in it."""
        self.spans: list[tuple[int, int]] = [(0, length)]
        self.bounds: list[Bounds] = []
        for leg in self.plan.up[:levels]:
            start, stop = self.spans[-1]
            bounds = leg.bounds(stop - start) if leg is not None else [(0, stop - start)]
            first, last = bounds[leg.link.index if leg is not None else 0]
            self.bounds.append(bounds)
            self.spans.append((start + first, start + last))

    def span(self, level: int) -> Tensor:
        """The numbers of this rank's span before that level."""
        return self.numbers[slice(*self.spans[level])]

    def take(self, length: int, dtype: torch.dtype) -> Tensor:
        """A buffer that goes back when the piece is done."""
        self._borrowed.append(self.pool.take(length, dtype, self.numbers.device))
        return self._borrowed[-1][:length]

    def release(self) -> None:
        """Give the buffers back."""
        while self._borrowed:
            self.pool.give(self._borrowed.pop())
        self.sums = None

    def widened(self, source: Tensor) -> Tensor:
        """These numbers in the sum's type, in a buffer if they are of another."""
        wide = sum_type(source.dtype)
        return source if source.dtype == wide else self.take(source.numel(), wide).copy_(source)

    def source(self, level: int) -> Tensor:
        """What this rank brings to a level: its sums so far, or where there are none yet its numbers. Beyond the first level
        that joins any ranks these too are in the sum's type, as those of others are that were summed there.
        """
        if self.sums is None and level > self.plan.first:
            self.sums = self.widened(self.span(level))
        return self.sums if self.sums is not None else self.span(level)

    def scatter(self, leg: Leg, source: Tensor, bounds: Bounds) -> Tensor:
        """Sum this rank's part over a level's members."""
        own = bounds[leg.link.index]
        if not leg.direct or source.dtype == sum_type(source.dtype):
            source = self.widened(source)
            total = source[slice(*own)]
        else:
            total = self.take(own[1] - own[0], sum_type(source.dtype))
        leg.scatter(source, total, bounds)
        return total

    def up(self, level: int) -> None:
        """One level up: this rank's span becomes its part of it."""
        leg, source = self.plan.up[level], self.source(level)
        if leg is not None and source.numel():
            self.sums = self.scatter(leg, source, self.bounds[level])

    def down(self, level: int) -> None:
        """One level down again: the members' parts come together."""
        leg = self.plan.down[level]
        numbers = self.span(level)
        if leg is not None and numbers.numel():
            leg.gather(numbers, self.bounds[level])

    def turn(self) -> None:
        """What the outermost level does."""
        raise NotImplementedError

    def steps(self) -> list[Step]:
        """What to do at each stage: the levels at which this rank has a group, and the outermost one in any case."""
        staged = self.plan.staged
        ups: list[Step] = [(level, "up", self._at(level, self.up)) for level in staged]
        downs: list[Step] = [(level, "down", self._at(level, self.down)) for level in reversed(staged)]
        return [*ups, (self.top, "top", self.turn), *downs]

    def _at(self, level: int, call: Callable[[int], None]) -> Callable[[], None]:
        return partial(call, level) if level in self.inner else _pass_by

    def finish(self, total: Tensor, out: Tensor) -> None:
        """Divide a sum, still in the sum's type, and put it where it belongs."""
        if self.divisor > 1:
            total.div_(self.divisor)
        if out.data_ptr() != total.data_ptr():
            out.copy_(total)


class Reduced(Piece):
    """An all-reduce: up, turn, down.

    Args:
        dropper, key, offset: who drops on the outermost level; what the caller calls the vector; where the piece begins in it.
    """

    def __init__(
        self, plan: Plan, numbers: Tensor, pool: Pool, divisor: int, dropper: Dropper | None, key: Any, offset: int
    ) -> None:
        super().__init__(plan, numbers, pool, divisor)
        self.dropper, self.key, self.offset = dropper, key, offset
        self.lay_out(numbers.numel(), len(plan.up) - 1)

    def turn(self) -> None:
        """The outermost level: sum, divide, and bring the result to its members."""
        leg, out = self.plan.up[self.top], self.span(self.top)
        if not out.numel():
            return
        source = self.source(self.top)
        if leg is None:
            self.finish(source, out)
        elif leg.scheme.drop:
            self.finish(self._dropped(leg, source), out)
        elif leg.scheme.algorithm == "native" and codec_for(leg.scheme.wire, sum_type(out.dtype)) is None:
            total = self.widened(source)
            leg.link.native_all_reduce(total)
            self.finish(total, out)
        elif leg.scheme.algorithm == "all_to_all" and leg.link.size == 2:
            wide = sum_type(source.dtype)
            total = source if source.dtype == wide else self.take(source.numel(), wide)
            leg.swap(source, total)
            self.finish(total, out)
        else:
            bounds = leg.bounds(out.numel())
            own = slice(*bounds[leg.link.index])
            self.finish(self.scatter(leg, source, bounds), out[own])
            leg.gather(out, bounds)
        self.release()

    def _dropped(self, leg: Leg, source: Tensor) -> Tensor:
        assert self.dropper is not None
        total = self.widened(source)
        shard = total.to(torch.float32)
        start, stop = self.spans[-1]
        key = (self.key, self.offset + start, self.offset + stop)
        self.dropper.all_reduce(shard, leg.link.group, key, drop=leg.scheme.drop, wire=leg.scheme.wire)
        return total if shard is total else total.copy_(shard)


class Scattered(Piece):
    """A reduce-scatter: all parts, packed in the order in which ranks end up with them, go up every level.

    Args:
        given: one row a rank; read only.
        out: this rank's result, as long as a row.
    """

    def __init__(self, plan: Plan, given: Tensor, out: Tensor, pool: Pool, divisor: int) -> None:
        super().__init__(plan, given, pool, divisor)
        self.given, self.out = given, out
        self.lay_out(given.numel(), len(plan.up))

    def up(self, level: int) -> None:
        """Before the first level the parts are packed."""
        if level == min(self.inner):
            self._pack()
        super().up(level)

    def turn(self) -> None:
        """After the last level the result is put out."""
        if not self.inner:
            self._pack()
        super().up(self.top)
        self.finish(self.sums if self.sums is not None else self.span(self.top + 1), self.out)
        self.release()

    def down(self, level: int) -> None:
        """Nothing: every rank has its part."""

    def _pack(self) -> None:
        self.numbers = self.take(self.given.numel(), self.given.dtype)
        order = torch.tensor(self.plan.order, device=self.given.device)
        torch.index_select(self.given, 0, order, out=self.numbers.view(self.given.shape))


class Gathered(Piece):
    """An all-gather: parts come down every level, packed, and are put in the order of ranks.

    Args:
        given: this rank's row.
        out: one row a rank.
        row: which row of the packed vector is this rank's.
    """

    def __init__(self, plan: Plan, given: Tensor, out: Tensor, pool: Pool, row: int) -> None:
        super().__init__(plan, given, pool, 1)
        self.given, self.out, self.row = given, out, row
        self.lay_out(out.numel(), len(plan.up))

    def up(self, level: int) -> None:
        """Nothing: there is nothing to sum."""

    def turn(self) -> None:
        """This rank's row goes in, and the outermost level's members gather."""
        self.numbers = self.take(self.out.numel(), self.out.dtype)
        self.numbers.view(self.out.shape)[self.row].copy_(self.given)
        leg = self.plan.up[self.top]
        if leg is not None:
            leg.gather(self.span(self.top), self.bounds[self.top])
        if not self.inner:
            self._unpack()

    def down(self, level: int) -> None:
        """After the innermost level all rows are put out."""
        super().down(level)
        if level == min(self.inner):
            self._unpack()

    def _unpack(self) -> None:
        order = torch.tensor(self.plan.order, device=self.out.device)
        self.out.index_copy_(0, order, self.numbers.view(self.out.shape))
        self.release()
