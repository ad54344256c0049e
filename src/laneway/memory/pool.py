"""Pools of memory and an allocator over them: exact accounting, victims chosen by a policy, never over capacity.

``DynamicAllocator`` keeps blocks in the fastest pool and moves victims one pool down when room is needed (and from there further
down). It moves no bytes itself: a callback does, or the blocks hold no storage and only the accounting moves.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType

from laneway.core import InputError, LanewayError, choice, positive_int
from laneway.memory.policies import POLICIES, Policy, Victim, View
from laneway.memory.trace import KINDS

ONLINE = tuple(name for name in POLICIES if name != "belady")
"""Policies that need no knowledge of the future."""
BANDWIDTH = 1e9
NOWHERE = 1e9
"""Seconds that a move out of the slowest pool is taken to cost."""


class MemoryPool:
    """Accounting of named blocks within a capacity.

    Args:
        name: of the pool, in errors and callbacks.
        capacity: bytes, an integer ≥ 1.
        bandwidth: bytes per second between this pool and the next faster one, which prices a move against a recomputation.
    """

    def __init__(self, name: str, capacity: int, bandwidth: float = BANDWIDTH) -> None:
        if not isinstance(bandwidth, int | float) or not 0 < bandwidth < math.inf:
            raise InputError("bandwidth", bandwidth, "bytes per second, a number > 0")
        self.name, self.capacity, self.bandwidth = name, positive_int("capacity", capacity), float(bandwidth)
        self._blocks: dict[str, int] = {}
        self._used = 0

    @property
    def used(self) -> int:
        """Bytes of all blocks."""
        return self._used

    @property
    def free(self) -> int:
        """Bytes left."""
        return self.capacity - self._used

    @property
    def blocks(self) -> Mapping[str, int]:
        """Bytes of every block by name, oldest first; read only."""
        return MappingProxyType(self._blocks)

    def add(self, name: str, nbytes: int) -> None:
        """Take a block in; raises LanewayError where the name is taken or the bytes are not free."""
        positive_int("nbytes", nbytes)
        if name in self._blocks:
            raise LanewayError(f"pool {self.name}: there is a block {name!r} already")
        if nbytes > self.free:
            raise LanewayError(f"pool {self.name}: block {name!r} needs {nbytes} bytes, {self.free} of {self.capacity} are free")
        self._blocks[name] = nbytes
        self._used += nbytes

    def remove(self, name: str) -> int:
        """Let a block go; returns its bytes. Raises LanewayError where there is none."""
        if name not in self._blocks:
            raise LanewayError(f"pool {self.name}: there is no block {name!r}")
        nbytes = self._blocks.pop(name)
        self._used -= nbytes
        return nbytes


@dataclass(frozen=True)
class Hint:
    """What is known about a block when it is allocated.

    Raises:
        InputError: a field is out of range.
    """

    kind: str = "activation"
    """One of ``trace.KINDS``; told to callbacks through the block."""
    depth: int | None = None
    """Place of its module in the order of the forward pass."""
    next_use: float | None = None
    """Seconds until it is expected to be used; None: as long again as it has been idle."""
    recompute_seconds: float | None = None
    """Time to make it again instead of moving it; None where that is not possible."""

    def __post_init__(self) -> None:
        choice("hint.kind", self.kind, KINDS)
        if self.depth is not None:
            positive_int("hint.depth", self.depth, 0)
        for name in ("next_use", "recompute_seconds"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0):
                raise InputError(f"hint.{name}", value, "seconds ≥ 0, or None")


@dataclass(eq=False)
class Block:
    """A piece of memory that the allocator knows. ``pool`` is None for one that was dropped (to be recomputed) or freed."""

    name: str
    nbytes: int
    hint: Hint
    pool: MemoryPool | None
    storage: object | None
    born: float
    last_use: float
    due: float | None
    freed: bool = False
    holds: int = 0


@dataclass(frozen=True, slots=True)
class _Seen:
    """A block as policies see it."""

    block: Block
    nbytes: int
    born: float
    last_use: float
    next_use: float
    depth: int | None
    write_seconds: float
    reload_seconds: float
    recompute_seconds: float | None

    @property
    def in_flight_seconds(self) -> float:
        return 0.0

    @property
    def known_use(self) -> float:
        return self.next_use


Step = tuple[Block, int, int | None]
"""A block leaves a pool for another (None: it is dropped)."""


class _Plan:
    """Moves that are thought of, and how full the pools would be after them."""

    def __init__(self, pools: Sequence[MemoryPool]) -> None:
        self.used = [pool.used for pool in pools]
        self.steps: list[Step] = []

    def take(self, block: Block, source: int, target: int | None) -> None:
        self.used[source] -= block.nbytes
        if target is not None:
            self.used[target] += block.nbytes
        self.steps.append((block, source, target))

    def undo(self, length: int) -> None:
        while len(self.steps) > length:
            block, source, target = self.steps.pop()
            self.used[source] += block.nbytes
            if target is not None:
                self.used[target] -= block.nbytes


class DynamicAllocator:
    """Allocates in the fastest pool, evicting what the policy chooses.

    Args:
        pools: from fast to slow, with different names.
        policy: cost_aware, lru or fifo, or a policy of one's own.
        move: ``move(block, source, target)`` moves a block's bytes between pools (by name). By default only blocks without
            storage move: their accounting does.
        recompute: ``recompute(block)`` makes a dropped block again, in the fastest pool; without it nothing is dropped.
        clock: seconds; uses and hints are measured with it.

    A whole eviction is planned before anything moves: where there is no room, nothing has changed.
    """

    def __init__(
        self,
        pools: Sequence[MemoryPool],
        policy: str | Policy = "cost_aware",
        *,
        move: Callable[[Block, str, str], None] | None = None,
        recompute: Callable[[Block], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not pools or len({pool.name for pool in pools}) < len(pools):
            raise InputError("pools", [pool.name for pool in pools], "one or more pools with different names")
        self.pools = tuple(pools)
        self.policy = POLICIES[choice("policy", policy, ONLINE)] if isinstance(policy, str) else policy
        self._move, self._recompute, self._clock = move, recompute, clock
        self._blocks: dict[str, Block] = {}
        self._made = 0

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Every block that was not freed, oldest first."""
        return tuple(self._blocks.values())

    def allocate(self, size: int, hint: Hint = Hint(), storage: object | None = None) -> Block:
        """A block of ``size`` bytes in the fastest pool; ``storage`` is what the callbacks find in it.

        Raises:
            LanewayError: nothing can make room; it names the need, the free and the evictable bytes.
        """
        positive_int("size", size)
        self._make_room(size)
        now, self._made = self._clock(), self._made + 1
        block = Block(f"block-{self._made}", size, hint, self.pools[0], storage, now, now, None)
        self.pools[0].add(block.name, size)
        self._blocks[block.name] = block
        self._expect(block, hint.next_use, now)
        return block

    def touch(self, block: Block, next_use: float | None = None) -> None:
        """Use ``block``: brings it into the fastest pool, or recomputes it. ``next_use``: seconds until the use after this one.

        Raises:
            LanewayError: it was freed, or nothing can make room for it.
        """
        self._check(block)
        with self.hold(block):
            if block.pool is not self.pools[0]:
                self._make_room(block.nbytes)
                self._bring_back(block)
        block.last_use = self._clock()
        self._expect(block, next_use, block.last_use)

    def free(self, block: Block) -> None:
        """Give a block back; raises LanewayError where that was done before."""
        self._check(block)
        if block.pool is not None:
            block.pool.remove(block.name)
        block.pool, block.storage, block.freed = None, None, True
        del self._blocks[block.name]

    @contextmanager
    def hold(self, block: Block) -> Generator[Block]:
        """Keep ``block`` where it is inside the ``with``: it is in use."""
        self._check(block)
        block.holds += 1
        try:
            yield block
        finally:
            block.holds -= 1

    def _check(self, block: Block) -> None:
        if self._blocks.get(block.name) is not block:
            raise LanewayError(f"{block.name} is not a block of this allocator" + (": it was freed" if block.freed else ""))

    def _expect(self, block: Block, next_use: float | None, now: float) -> None:
        block.due = None if next_use is None else now + next_use

    def _bring_back(self, block: Block) -> None:
        fast, source = self.pools[0], block.pool
        if source is None:
            fast.add(block.name, block.nbytes)
            block.pool, block.born = fast, self._clock()
            try:
                assert self._recompute is not None
                self._recompute(block)
            except BaseException:
                fast.remove(block.name)
                block.pool = None
                raise
            return
        self._carry(block, source, fast)

    def _carry(self, block: Block, source: MemoryPool, target: MemoryPool) -> None:
        """Both pools count the block while it moves, as both hold its bytes."""
        target.add(block.name, block.nbytes)
        try:
            if self._move is not None:
                self._move(block, source.name, target.name)
            elif block.storage is not None:
                raise LanewayError(f"{block.name} holds storage, and the allocator was given no callback that moves it")
        except BaseException:
            target.remove(block.name)
            raise
        source.remove(block.name)
        block.pool, block.born = target, self._clock()

    def _make_room(self, nbytes: int) -> None:
        plan = _Plan(self.pools)
        if not self._room(plan, 0, nbytes):
            fast = self.pools[0]
            raise LanewayError(
                f"pool {fast.name}: {nbytes} bytes are needed, {fast.free} of {fast.capacity} are free and "
                f"{self._evictable()} can be evicted"
            )
        for block, source, target in plan.steps:
            if target is None:
                self.pools[source].remove(block.name)
                block.pool = block.storage = None
            else:
                self._carry(block, self.pools[source], self.pools[target])

    def _room(self, plan: _Plan, index: int, nbytes: int) -> bool:
        """Plan room for ``nbytes`` in pool ``index``; False, and the plan as it was, where there is none."""
        if index == len(self.pools) or nbytes > self.pools[index].capacity:
            return False
        length, need = len(plan.steps), plan.used[index] + nbytes - self.pools[index].capacity
        if need <= 0:
            return True
        for freed in self._evictions(plan, index):
            need -= freed
            if need <= 0:
                return True
        plan.undo(length)
        return False

    def _evictable(self) -> int:
        return sum(self._evictions(_Plan(self.pools), 0))

    def _evictions(self, plan: _Plan, index: int) -> Iterator[int]:
        """Plan one eviction from pool ``index`` after the other, in the policy's order; yields the bytes of each."""
        for victim in self._order(plan, index):
            seen = victim.entry
            assert isinstance(seen, _Seen)
            if victim.drop:
                plan.take(seen.block, index, None)
            elif self._room(plan, index + 1, seen.nbytes):
                plan.take(seen.block, index, index + 1)
            elif seen.recompute_seconds is not None:
                plan.take(seen.block, index, None)
            else:
                continue
            yield seen.nbytes

    def _order(self, plan: _Plan, index: int) -> list[Victim]:
        """Every block of the pool that may go, best victim first."""
        now, moving = self._clock(), {block.name for block, _, _ in plan.steps}
        pool = self.pools[index]
        there = [self._blocks[name] for name in pool.blocks if name not in moving]
        seen = [self._seen(block, index, now) for block in there if not block.holds]
        need = sum(entry.nbytes for entry in seen)
        # Moves are done while the caller waits: nothing hides them.
        return self.policy(View(now, need, seen, read_busy=1.0, write_busy=1.0)) if seen else []

    def _seen(self, block: Block, index: int, now: float) -> _Seen:
        last = index + 1 == len(self.pools)
        seconds = NOWHERE if last else block.nbytes / self.pools[index + 1].bandwidth
        due = block.due if block.due is not None else now + max(now - block.last_use, 0.0)
        again = block.hint.recompute_seconds if self._recompute is not None else None
        return _Seen(block, block.nbytes, block.born, block.last_use, due, block.hint.depth, seconds, seconds, again)
