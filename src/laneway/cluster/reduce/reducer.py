"""Reductions and gathers over the levels of a network, as a scheme says."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, overload

import torch
from torch import Tensor

from laneway.cluster.reduce.buffers import Pool
from laneway.cluster.reduce.checks import agree, check_scheme, matching, summable, vector
from laneway.cluster.reduce.flat import Flat
from laneway.cluster.reduce.groups import LevelGroups
from laneway.cluster.reduce.legs import Leg
from laneway.cluster.reduce.pieces import Dropper, Gathered, Piece, Reduced, Scattered
from laneway.cluster.reduce.pipeline import Pipeline
from laneway.cluster.reduce.places import split
from laneway.cluster.reduce.plan import Links, Plan, Way
from laneway.cluster.reduce.scheme import FLAT, LevelScheme, ReductionScheme, SchemeTable, schemes_of
from laneway.cluster.reduce.work import Observer, ReductionError, Timing, Work
from laneway.core import InputError, LanewayError, choice

__all__ = ["HierarchicalReducer"]

OPS = ("sum", "mean")


class HierarchicalReducer:
    """All-reduce, reduce-scatter and all-gather over the levels of a network.

    An all-reduce goes up the levels, at each of which members sum what they hold and keep a part each, turns at the outermost
    one, and comes down again: N bytes put 2(R−1)/R·N on the uplink of each of R racks, whatever is inside them, where a flat
    ring puts 2(W−1)/W·N. Pieces of a large vector follow each other, each on another level, and a thread serves each stage.

    Sums are in fp32, of fp64 numbers in fp64; means are divided once, after the last sum and before anything is rounded to the
    tensor's type, so that half-precision values of any size pass. All ranks end with the same bits.

    Error against the exact sum, as a share of Σ|x| over the ranks (of the largest Σ|x| of its block of 128 for int8), besides the
    rounding of the result to the tensor's type: `error_bound` of this package says it for a scheme. Each narrow level adds two
    roundings (2⁻⁹ each for bf16, 1/254 for int8) however many ranks it joins.

    On gloo, members exchange messages of their own (receives first). On other devices the calling thread enqueues everything on
    its current stream (always the same one), one level after the other, as one batch of messages each; there "native", which is
    NCCL's own reduce-scatter, all-gather and all-reduce, is the better choice inside a level.

    Args:
        groups: of all levels.
        scheme: how to go over them, or a table of schemes by the vector's bytes; `FLAT`: one native collective over all ranks.
        debug: check at each call that all ranks ask for the same, with a small collective.

    Attributes:
        scheme: the one in use.
        dropper: sums the outermost level's parts where the scheme drops there.
        observers: called with a `Timing` after each phase of each piece.

    Raises:
        InputError: a scheme that doesn't fit the groups.
    """

    def __init__(self, groups: LevelGroups, scheme: ReductionScheme | SchemeTable = FLAT, *, debug: bool = False) -> None:
        self.groups, self.debug = groups, debug
        self.dropper: Dropper | None = None
        self.observers: list[Observer] = []
        self._links, self._pool = Links(groups), Pool()
        self._flat = Flat(groups, self.observers)
        self._pipeline = Pipeline(_stages(groups))
        self._sent, self._failed_piece = 0, 0
        self._failed: ReductionError | None = None
        self._use(scheme)

    @property
    def scheme(self) -> ReductionScheme | SchemeTable:
        """How it goes over the levels, as it was given."""
        return self._scheme

    @property
    def sent_bytes(self) -> list[int]:
        """Bytes that this rank sent over each level so far; those of flat collectives aren't in it."""
        return self._links.sent()

    def set_scheme(self, scheme: ReductionScheme | SchemeTable) -> None:
        """Another scheme from the next call on; what is under way ends as it began. All ranks must do so between the same calls.

        Raises:
            InputError: it doesn't fit the groups.
            LanewayError: under `debug`, another scheme than on other ranks.
        """
        self._check(scheme)
        self._agree("scheme", scheme)
        self._use(scheme)

    @overload
    def all_reduce(
        self, tensor: Tensor, *, op: str = ..., key: Any = ..., first: int = ..., async_op: Literal[False] = ...
    ) -> Tensor: ...
    @overload
    def all_reduce(self, tensor: Tensor, *, op: str = ..., key: Any = ..., first: int = ..., async_op: Literal[True]) -> Work: ...

    def all_reduce(
        self, tensor: Tensor, *, op: str = "sum", key: Any = None, first: int = 0, async_op: bool = False
    ) -> Tensor | Work:
        """Sum or average a tensor over all ranks, in place.

        Args:
            tensor: contiguous, of a float type, the same shape on all ranks; any size.
            op: "sum" or "mean".
            key: what the dropper calls this vector; it gets (key, start, stop).
            first: innermost level to go over: 1 where the members of a host hold different parts of a vector (after
                `scatter_inside`), so that each is summed with its like in other hosts. A mean is over all ranks all the same. A
                flat scheme then goes over each level with its native collective.
            async_op: return at once; the tensor must be left alone until the work is done.

        Returns:
            The tensor, or the work that leads to it.

        Raises:
            InputError: an integer type, a tensor with gaps, another op, a scheme that drops and no dropper; `first` on ragged
                groups.
            ReductionError: a collective failed; the tensor's content is lost.
        """
        numbers = summable("tensor", tensor)
        divisor = self._begin("all_reduce", op, numbers)
        if first:
            self._check_part("first", first)
        way = self._way(numbers.nbytes)
        if way.scheme.levels and way.scheme.levels[-1].drop and self.dropper is None:
            raise InputError("scheme.drop", way.scheme.levels[-1].drop, "0 without a dropper", "set reducer.dropper first")
        if not numbers.numel():
            return Work(tensor, 0) if async_op else tensor
        if first:
            return self._send(self._reduced(numbers, divisor, key, self._outer(way, first)), tensor, async_op)
        if way.reducing is None:
            found = self._flat.all_reduce(numbers, divisor, async_op)
            return found if isinstance(found, Work) else tensor
        return self._send(self._reduced(numbers, divisor, key, way.reducing), tensor, async_op)

    @overload
    def reduce_scatter(
        self, output: Tensor, input: Tensor, *, op: str = ..., key: Any = ..., async_op: Literal[False] = ...
    ) -> Tensor: ...
    @overload
    def reduce_scatter(
        self, output: Tensor, input: Tensor, *, op: str = ..., key: Any = ..., async_op: Literal[True]
    ) -> Work: ...

    def reduce_scatter(
        self, output: Tensor, input: Tensor, *, op: str = "sum", key: Any = None, async_op: bool = False
    ) -> Tensor | Work:
        """Sum or average `input` over all ranks; rank r gets part r of as many equal parts as there are ranks.

        Every level is a reduce-scatter, a tree as a direct exchange; nothing is dropped. Where groups are ragged, an all-reduce
        of a copy serves, with twice the bytes.

        Args:
            output, input: contiguous, of the same float type; `input` has the world size times as many elements, and is only
                read.
            op, async_op: as for `all_reduce`.
            key: not used here: a reduce-scatter drops nothing.

        Raises:
            InputError: types or sizes that don't fit, or as for `all_reduce`.
            ReductionError: a collective failed.
        """
        given, out = summable("input", input), summable("output", output)
        divisor = self._begin("reduce_scatter", op, given)
        matching(given, out, self.groups.world, "input")
        if not out.numel():
            return Work(output, 0) if async_op else output
        rows, way = given.view(self.groups.world, -1), self._way(given.nbytes)
        if way.reducing is None or way.scattering is None:
            found = self._flat.reduce_scatter(out, rows, divisor, async_op)
            return found if isinstance(found, Work) else output
        if self.groups.places.ragged:
            copy = given.clone()
            mine = copy.view_as(rows)[self.groups.rank]
            return self._send(self._reduced(copy, divisor, key, way.reducing), output, async_op, lambda: out.copy_(mine))
        pieces = [
            Scattered(way.scattering, rows[:, start:stop], out[start:stop], self._pool, divisor)
            for start, stop in self._columns(way, out.numel(), given.itemsize)
        ]
        return self._send(pieces, output, async_op)

    def scatter_inside(self, output: Tensor, input: Tensor) -> Tensor:
        """Sum `input` over the members of the innermost level alone; member i gets part i of as many equal parts.

        It runs in the calling thread, by the scheme's innermost algorithm (a direct exchange in a flat scheme), and not beside
        another reduction that goes over that level.

        Args:
            output, input: contiguous, of the same float type; `input` has as many times as many elements as the level has
                members, and is spoilt.

        Raises:
            InputError: types or sizes that don't fit, ragged groups.
            ReductionError: a collective failed.
        """
        given, out = summable("input", input), summable("output", output)
        self._begin("scatter_inside", "sum", given)
        self._check_part("first", 0)
        members = len(self.groups.ranks[0])
        matching(given, out, members, "input")
        link = self._links.up[0]
        if link is None:
            return output.copy_(input.view_as(output))
        if out.numel():
            plan = self._way(given.nbytes).scattering
            level = LevelScheme() if plan is None else plan.scheme.levels[0]
            level = level if level.algorithm == "ring" else LevelScheme(wire=level.wire)  # a torus has its parts in another order
            leg = Leg(link, level, members)
            piece = Piece(Plan(ReductionScheme((level,)), (leg,), (leg,), 0, (), ()), given, self._pool, 1)
            bounds = split(given.numel(), members)
            self._sent += 1
            self._step(self._sent, 0, "up", lambda: piece.finish(piece.scatter(leg, given, bounds), out))
            piece.release()
        return output

    @overload
    def all_gather(self, output: Tensor, input: Tensor, *, async_op: Literal[False] = ...) -> Tensor: ...
    @overload
    def all_gather(self, output: Tensor, input: Tensor, *, async_op: Literal[True]) -> Work: ...

    def all_gather(self, output: Tensor, input: Tensor, *, async_op: bool = False) -> Tensor | Work:
        """Every rank's `input`, one after the other, into `output`: bit for bit, whatever wire the scheme has.

        Where groups are ragged, one flat native collective serves.

        Args:
            output, input: contiguous, of the same type, any; `output` has the world size times as many elements.
            async_op: return at once; neither may be touched until the work is done.

        Raises:
            InputError: types or sizes that don't fit.
            ReductionError: a collective failed.
        """
        given, out = vector("input", input), vector("output", output)
        self._begin("all_gather", "sum", given)
        matching(out, given, self.groups.world, "output")
        if not given.numel():
            return Work(output, 0) if async_op else output
        given, rows = given.view(torch.uint8), out.view(torch.uint8).view(self.groups.world, -1)
        way = self._way(out.nbytes)
        if way.gathering is None or self.groups.places.ragged:
            found = self._flat.all_gather(rows, given, async_op)
            return found if isinstance(found, Work) else output
        row = way.gathering.order.index(self.groups.rank)
        pieces = [
            Gathered(way.gathering, given[start:stop], rows[:, start:stop], self._pool, row)
            for start, stop in self._columns(way, given.numel(), 1)
        ]
        return self._send(pieces, output, async_op)

    def close(self, *, wait: bool = True) -> None:
        """End the threads; a second call does nothing. The groups stay.

        Args:
            wait: until what is under way has ended. False leaves a thread behind that is stuck in a collective.
        """
        self._pipeline.close(wait=wait)

    def _check(self, scheme: ReductionScheme | SchemeTable) -> None:
        for each in schemes_of(scheme):
            check_scheme(each, self.groups)

    def _use(self, scheme: ReductionScheme | SchemeTable) -> None:
        self._check(scheme)
        self._scheme = scheme
        self._ways = {each: Way.make(each, self.groups.places, self._links) for each in schemes_of(scheme)}

    def _way(self, nbytes: int) -> Way:
        """How a vector of that size goes."""
        scheme = self._scheme
        return self._ways[scheme.at(nbytes) if isinstance(scheme, SchemeTable) else scheme]

    def _begin(self, kind: str, op: str, numbers: Tensor) -> int:
        """What to divide by, once everything is in order."""
        choice("op", op, OPS)
        if self._pipeline.closed:
            raise LanewayError("the reducer is closed")
        if self._failed is not None:
            raise ReductionError(f"an earlier reduction failed, and its groups can't be used any more: {self._failed}")
        self._agree(kind, (op, str(numbers.dtype), numbers.numel(), self._scheme))
        return self.groups.world if op == "mean" else 1

    def _agree(self, kind: str, asked: Any) -> None:
        if self.debug:
            agree(self.groups.flat, (kind, asked), f"the ranks ask for different things: here {kind} of {asked}")

    def _check_part(self, field: str, first: int) -> None:
        """Whether some levels can be gone over without the others."""
        if first not in range(len(self.groups.names)):
            raise InputError(field, first, f"a level, 0 to {len(self.groups.names) - 1}")
        if self.groups.places.ragged:
            raise InputError(field, first, "groups of one size at each level: these are ragged")

    def _outer(self, way: Way, first: int) -> Plan:
        """The plan of the levels from that one outwards."""
        places, plan = self.groups.places, way.reducing
        if plan is None:
            plan = Plan.make(ReductionScheme((LevelScheme("native"),) * len(self.groups.names)), places, self._links)
        return plan.from_level(first, places)

    def _reduced(self, numbers: Tensor, divisor: int, key: Any, plan: Plan) -> list[Reduced]:
        chunk, count = plan.scheme.chunk_bytes, numbers.numel()
        pieces = max(1, numbers.nbytes // chunk) if chunk else 1
        unit = math.prod(self.groups.places.widths)
        each = -(-count // (pieces * unit)) * unit
        return [
            Reduced(plan, numbers[start : start + each], self._pool, divisor, self.dropper, key, start)
            for start in range(0, count, each)
        ]

    def _columns(self, way: Way, length: int, itemsize: int) -> list[tuple[int, int]]:
        """Pieces of every rank's part."""
        chunk = way.scheme.chunk_bytes
        pieces = max(1, self.groups.world * length * itemsize // chunk) if chunk else 1
        return split(length, min(pieces, length))

    def _send(
        self, pieces: Sequence[Piece], result: Tensor, asynchronous: bool, finish: Callable[[], object] | None = None
    ) -> Tensor | Work:
        work = Work(result, len(pieces), finish)
        on_device = result.device.type != "cpu"
        alone = len(pieces) == 1 and not asynchronous
        for piece in pieces:
            self._sent += 1
            calls = [partial(self._step, self._sent, *step) for step in piece.steps()]
            if (on_device or alone) and self._pipeline.run(calls):
                work.piece_done(None)
            else:
                self._pipeline.submit(calls, work.piece_done)
        return work if asynchronous else work.wait()

    def _step(self, piece: int, level: int, phase: str, call: Callable[[], None]) -> None:
        """One stage's part of a piece. After a failure no later piece goes on: who waits for which message is lost then."""
        if self._failed is not None and piece >= self._failed_piece:
            raise self._failed
        link = (self._links.down if phase == "down" else self._links.up)[level]
        before, started = link.sent if link else 0, time.perf_counter()
        try:
            call()
        except Exception as error:
            raise self._fail(piece, level, phase, error) from error
        if self.observers:
            timing = Timing(level, phase, (link.sent if link else 0) - before, time.perf_counter() - started, started)
            for observer in self.observers:
                observer(timing)

    def _fail(self, piece: int, level: int, phase: str, error: Exception) -> ReductionError:
        ranks = ", ".join(map(str, self.groups.ranks[level]))
        told = ReductionError(f"a reduction failed at {self.groups.names[level]} ({phase}) among ranks {ranks}: {error}")
        if self._failed is None or piece < self._failed_piece:
            self._failed_piece, self._failed = piece, told
        return told


def _stages(groups: LevelGroups) -> list[str]:
    """Names of the stages that this rank's pieces go through."""
    inner = [name for name, group in zip(groups.names[:-1], groups.up[:-1], strict=True) if group is not None]
    return [*(f"{name} up" for name in inner), f"{groups.names[-1]} top", *(f"{name} down" for name in reversed(inner))]
