"""Pools and the allocator: exact accounting whatever happens, victims by policy, errors that leave everything as it was."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from laneway.core import InputError, LanewayError
from laneway.memory.policies import lru
from laneway.memory.pool import ONLINE, DynamicAllocator, Hint, MemoryPool

maybe = st.none() | st.floats(0, 10)
hints = st.builds(Hint, st.sampled_from(["activation", "kv"]), st.none() | st.integers(0, 9), maybe, maybe)


class Allocator(RuleBasedStateMachine):
    """Every block holds a payload that really moves between the folders of this model."""

    blocks = Bundle("blocks")

    @initialize(
        capacities=st.lists(st.integers(1, 100), min_size=1, max_size=3), policy=st.sampled_from(ONLINE), dropping=st.booleans()
    )
    def start(self, capacities, policy, dropping):
        self.pools = [MemoryPool(f"pool {index}", capacity) for index, capacity in enumerate(capacities)]
        self.places = {pool.name: {} for pool in self.pools}
        self.now, self.contents, self.fail = 0.0, {}, False
        recompute = self.recompute if dropping else None
        self.allocator = DynamicAllocator(self.pools, policy, move=self.move, recompute=recompute, clock=lambda: self.now)

    def move(self, block, source, target):
        if self.fail:
            raise OSError("no")
        self.places[target][block.name] = self.places[source].pop(block.name)

    def recompute(self, block):
        block.storage = self.contents[block.name]
        self.places[self.pools[0].name][block.name] = self.contents[block.name]

    def tidy(self):
        """What was dropped is gone."""
        for block in self.allocator.blocks:
            if block.pool is None:
                for place in self.places.values():
                    place.pop(block.name, None)

    @rule(target=blocks, size=st.integers(1, 60), hint=hints)
    def allocate(self, size, hint):
        self.now += 1.0
        before = self.state()
        try:
            block = self.allocator.allocate(size, hint, storage=object())
        except LanewayError as error:
            self.refused(error, before)
            return None
        assert block.pool is self.pools[0]
        self.contents[block.name] = block.storage
        self.places[self.pools[0].name][block.name] = block.storage
        return block

    @rule(block=blocks, next_use=maybe)
    def touch(self, block, next_use):
        self.now += 1.0
        before = self.state()
        if block is None or block.freed:
            return
        try:
            self.allocator.touch(block, next_use)
        except LanewayError as error:
            self.refused(error, before)
            return
        assert block.pool is self.pools[0]
        assert block.storage is self.contents[block.name], "no content lost"

    @rule(block=blocks)
    def fail_to_move(self, block):
        """A callback that raises loses nothing, and what had moved before it is accounted for."""
        if block is None or block.freed:
            return
        self.fail = True
        try:
            self.allocator.touch(block)
        except (OSError, LanewayError):
            pass
        finally:
            self.fail = False

    @rule(block=blocks, other=blocks)
    def hold(self, block, other):
        if block is None or block.freed or block.pool is not self.pools[0]:
            return
        with self.allocator.hold(block):
            self.touch(other, None)
            assert block.pool is self.pools[0], "it was in use"

    @rule(block=consumes(blocks))
    def free(self, block):
        if block is None or block.freed:
            return
        self.allocator.free(block)
        for place in self.places.values():
            place.pop(block.name, None)
        with pytest.raises(LanewayError, match="it was freed"):
            self.allocator.touch(block)

    def refused(self, error, before):
        assert "bytes are needed" in str(error)
        assert self.state() == before, "nothing has changed"

    def state(self):
        return [(block.name, block.pool and block.pool.name) for block in self.allocator.blocks]

    @invariant()
    def accounting(self):
        if not hasattr(self, "pools"):
            return
        self.tidy()
        for pool in self.pools:
            mine = {block.name: block.nbytes for block in self.allocator.blocks if block.pool is pool}
            assert dict(pool.blocks) == mine
            assert pool.used == sum(mine.values()) <= pool.capacity
            assert pool.free == pool.capacity - pool.used
            assert set(self.places[pool.name]) == set(mine), "the bytes are where the accounting says"


Allocator.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_allocator = Allocator.TestCase


def pools(*capacities):
    return [MemoryPool(name, capacity) for name, capacity in zip(("device", "host", "disk"), capacities, strict=False)]


def test_victims_go_down_pool_by_pool():
    fast, middle, slow = pools(2, 2, 9)
    moves = []
    allocator = DynamicAllocator([fast, middle, slow], "fifo", move=lambda block, *way: moves.append((block.name, *way)))
    blocks = [allocator.allocate(1) for _ in range(5)]
    assert [block.pool.name for block in blocks] == ["disk", "host", "host", "device", "device"]
    assert moves[-2:] == [("block-1", "host", "disk"), ("block-3", "device", "host")]
    allocator.touch(blocks[0])
    assert blocks[0].pool is fast
    assert (fast.used, middle.used, slow.used) == (2, 2, 1)


def test_a_way_down_that_leads_nowhere_is_not_begun():
    """Neither block of the first pool can move: too little of what is below could make way. So one is dropped."""
    allocator = DynamicAllocator(pools(12, 9, 1), "fifo", recompute=lambda block: None)
    small, large = allocator.allocate(1), allocator.allocate(8)
    allocator.allocate(10)
    again = allocator.allocate(2, Hint(recompute_seconds=1.0))
    allocator.allocate(2)
    assert (small.pool.name, large.pool.name, again.pool) == ("host", "host", None)


def test_the_policy_decides_who_goes():
    def run(policy):
        allocator = DynamicAllocator(pools(30, 90), policy, clock=iter(range(100)).__next__)
        soon, later = allocator.allocate(10, Hint(next_use=50.0)), allocator.allocate(10, Hint(next_use=500.0))
        allocator.allocate(10, Hint(next_use=1.0))
        allocator.touch(soon, 40.0)
        allocator.allocate(10)
        return soon.pool.name, later.pool.name

    assert run("fifo") == ("host", "device")
    assert run("lru") == ("device", "host")
    assert run("cost_aware") == ("device", "host")
    assert run(lru) == run("lru")


def test_what_is_cheap_to_recompute_is_dropped():
    slow_link = [MemoryPool("device", 20), MemoryPool("host", 100, bandwidth=10.0)]
    made = []

    def again(block):
        made.append(block.name)
        block.storage = "again"

    allocator = DynamicAllocator(slow_link, recompute=again, clock=iter(range(100)).__next__)
    cheap = allocator.allocate(10, Hint(next_use=9.0, recompute_seconds=0.01), storage="first")
    other = allocator.allocate(10, Hint(next_use=9.0))
    allocator.allocate(10)
    assert (cheap.pool, cheap.storage, other.pool.name) == (None, None, "device")
    allocator.touch(cheap)
    assert (made, cheap.storage, cheap.pool.name) == (["block-1"], "again", "device")
    assert other.pool.name == "host"


def test_no_room_names_need_free_and_evictable():
    allocator = DynamicAllocator(pools(10, 4))
    allocator.allocate(3)
    held = allocator.allocate(5)
    with pytest.raises(LanewayError, match="pool device: 11 bytes are needed, 2 of 10 are free and 3 can be evicted"):
        allocator.allocate(11)
    with allocator.hold(held), pytest.raises(LanewayError, match="6 bytes are needed, 2 of 10 are free and 3 can be evicted"):
        allocator.allocate(6)
    assert allocator.allocate(5).pool.name == "device"


def test_storage_needs_a_callback_that_moves_it():
    allocator = DynamicAllocator(pools(10, 10))
    block = allocator.allocate(10, storage=bytearray(10))
    with pytest.raises(LanewayError, match="block-1 holds storage"):
        allocator.allocate(1)
    assert (block.pool.name, [pool.used for pool in allocator.pools]) == ("device", [10, 0])


def test_a_pool_never_holds_more_than_it_has():
    pool = MemoryPool("host", 10)
    pool.add("a", 6)
    for name, nbytes, part in (("b", 5, "needs 5 bytes, 4 of 10 are free"), ("a", 1, "already")):
        with pytest.raises(LanewayError, match=part):
            pool.add(name, nbytes)
    assert (pool.used, pool.free, dict(pool.blocks)) == (6, 4, {"a": 6})
    assert pool.remove("a") == 6
    with pytest.raises(LanewayError, match="no block 'a'"):
        pool.remove("a")


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: MemoryPool("x", 0), "capacity"),
        (lambda: MemoryPool("x", 1, bandwidth=0.0), "bandwidth"),
        (lambda: MemoryPool("x", 1).add("a", 0), "nbytes"),
        (lambda: Hint(kind="activations"), "hint.kind"),
        (lambda: Hint(depth=-1), "hint.depth"),
        (lambda: Hint(next_use=-1.0), "hint.next_use"),
        (lambda: Hint(recompute_seconds=float("nan")), "hint.recompute_seconds"),
        (lambda: DynamicAllocator([]), "pools"),
        (lambda: DynamicAllocator([MemoryPool("x", 1), MemoryPool("x", 2)]), "pools"),
        (lambda: DynamicAllocator(pools(1), "belady"), "policy"),
        (lambda: DynamicAllocator(pools(1)).allocate(0), "size"),
    ],
)
def test_bad_arguments(make, field):
    with pytest.raises(InputError) as caught:
        make()
    assert caught.value.field == field
