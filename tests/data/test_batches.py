from __future__ import annotations

import hashlib
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laneway.core import InputError
from laneway.data import BatchLoader, evaluation_batches
from laneway.data.order import Permutation, number

# A corpus whose every token is its own position, so that a batch says which windows it was made of.
SHAPES = st.tuples(st.integers(1, 9), st.integers(0, 300)).map(lambda pair: (pair[0], pair[0] + 1 + pair[1]))
SEEDS = st.integers(0, 2**63)


def positions(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.uint32)


def starts(batch: tuple[torch.Tensor, torch.Tensor]) -> list[int]:
    return batch[0][:, 0].tolist()


@given(st.integers(1, 3000), st.binary(max_size=8))
@settings(deadline=None)
def test_the_shuffle_is_a_permutation(count: int, key: bytes) -> None:
    items = Permutation(count, key)(np.arange(count))
    assert items.dtype == np.int64
    assert sorted(items.tolist()) == list(range(count))


def test_the_shuffle_of_a_huge_corpus_needs_only_what_is_asked_for() -> None:
    count = 10**13
    items = Permutation(count, b"key")(np.arange(count - 5000, count))
    assert len(set(items.tolist())) == 5000
    assert items.min() >= 0
    assert items.max() < count
    assert abs(items.mean() / count - 0.5) < 0.02  # 5000 draws: the standard error is 0.004


@pytest.mark.parametrize("count", [2, 3, 5, 16, 100])
def test_the_shuffle_is_even(count: int) -> None:
    table = np.zeros((count, count))
    for epoch in range(800):
        table[np.arange(count), Permutation(count, f"{epoch}".encode())(np.arange(count))] += 1
    # Every cell is binomial: 5 standard deviations among at most 10 000 cells leave a false alarm at about 1 in 200,
    # and the keys are fixed, so the answer is the same every time.
    assert np.abs(table - 800 / count).max() < 5 * np.sqrt(800 / count)


def plain_shuffle(count: int, key: bytes) -> list[int]:
    """The same permutation in plain Python integers, one item at a time."""
    bits = max(2, ((count - 1).bit_length() + 1) // 2)
    raw = hashlib.blake2b(key, digest_size=64, person=b"laneway order").digest()
    keys = [int.from_bytes(raw[8 * turn : 8 * turn + 8], "little") for turn in range(8)]

    def network(item: int) -> int:
        left, right = item >> bits, item % 2**bits
        for turn in keys:
            word = right ^ turn
            word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
            word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
            left, right = right, left ^ ((word ^ (word >> 31)) % 2**bits)
        return (left << bits) | right

    items = []
    for item in map(network, range(count)):
        while item >= count:
            item = network(item)
        items.append(item)
    return items


@pytest.mark.parametrize("count", [1, 2, 10, 255, 256, 257, 1000])
def test_the_shuffle_is_the_stated_one(count: int) -> None:
    assert Permutation(count, b"7/0")(np.arange(count)).tolist() == plain_shuffle(count, b"7/0")


def test_the_order_of_a_seed_never_changes() -> None:
    """Resumed runs rely on these very numbers: a change of them needs a new version of the state."""
    assert Permutation(10, b"7/0")(np.arange(10)).tolist() == [8, 5, 0, 3, 4, 2, 1, 6, 9, 7]
    assert [number(f"7/{epoch}".encode(), 100) for epoch in range(4)] == [76, 37, 97, 77]


@given(SHAPES, SEEDS, st.integers(0, 3))
@settings(deadline=None, max_examples=50)
def test_each_window_comes_once_an_epoch(shape: tuple[int, int], seed: int, epoch: int) -> None:
    context, count = shape
    loader = BatchLoader(positions(count), context, 1, seed)
    loader.load_state_dict({**loader.state_dict(), "epoch": epoch})
    found = sorted(starts(next(loader))[0] for _ in range(loader.windows))
    assert (loader.epoch, loader.position) == (epoch + 1, 0)
    assert np.diff(found).tolist() == [context] * (loader.windows - 1)
    offset, unused = found[0], count - (found[-1] + context + 1)
    assert 0 <= offset < context
    assert 0 <= unused < 2 * context


@given(SHAPES, SEEDS)
@settings(deadline=None)
def test_targets_are_the_next_tokens(shape: tuple[int, int], seed: int) -> None:
    context, count = shape
    inputs, targets = next(BatchLoader(positions(count), context, 3, seed))
    assert inputs.shape == targets.shape == (3, context)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, inputs + 1)
    assert torch.equal(inputs, inputs[:, :1] + torch.arange(context))
    assert targets.max() < count


@given(SHAPES, SEEDS, st.integers(1, 4), st.integers(1, 6), st.integers(1, 7))
@settings(deadline=None, max_examples=25)
def test_ranks_partition_the_global_batch(shape, seed: int, local: int, world: int, steps: int) -> None:
    context, count = shape
    batch = local * world
    alone = BatchLoader(positions(count), context, batch, seed)
    ranks = [BatchLoader(positions(count), context, batch, seed, rank, world) for rank in range(world)]
    for _ in range(steps):
        inputs, targets = next(alone)
        parts = [next(loader) for loader in ranks]
        assert torch.equal(torch.cat([part[0] for part in parts]), inputs)
        assert torch.equal(torch.cat([part[1] for part in parts]), targets)
        assert all(loader.state_dict() == alone.state_dict() for loader in ranks)


@given(SHAPES, SEEDS, st.integers(0, 30), st.sampled_from([1, 2, 3, 6]), st.sampled_from([1, 2, 3, 6]))
@settings(deadline=None, max_examples=25)
def test_resume_with_other_ranks_goes_on_with_the_next_window(shape, seed: int, steps: int, before: int, after: int) -> None:
    context, count = shape
    whole = BatchLoader(positions(count), context, 6, seed)
    line = [starts(next(whole)) for _ in range(steps + 4)]

    first = BatchLoader(positions(count), context, 6, seed, rank=before - 1, world_size=before)
    for _ in range(steps):
        next(first)
    state = first.state_dict()
    assert len(state) == 5
    ranks = [BatchLoader(positions(count), context, 6, 0, rank, after) for rank in range(after)]
    for loader in ranks:
        loader.load_state_dict(state)
    rest = [list(itertools.chain(*(starts(next(loader)) for loader in ranks))) for _ in range(4)]
    assert rest == line[steps:]


@given(SHAPES, SEEDS, st.integers(0, 20), st.integers(1, 8))
@settings(deadline=None, max_examples=25)
def test_resume_with_another_batch_size_neither_skips_nor_repeats(shape, seed: int, steps: int, batch: int) -> None:
    context, count = shape
    first = BatchLoader(positions(count), context, 3, seed)
    line = [starts(next(first)) for _ in range(steps)]
    second = BatchLoader(positions(count), context, batch, seed)
    second.load_state_dict(first.state_dict())
    line += [starts(next(second)) for _ in range(5)]
    single = BatchLoader(positions(count), context, 1, seed)
    flat = list(itertools.chain(*line))
    assert flat == [starts(next(single))[0] for _ in flat]


def test_epochs_differ_in_order_and_in_window_boundaries() -> None:
    loader = BatchLoader(positions(64 * 50), 64, 1, seed=3)
    epochs = [[starts(next(loader))[0] for _ in range(loader.windows)] for _ in range(8)]
    assert len({min(epoch) for epoch in epochs}) > 4
    assert len({tuple((start - min(epoch)) // 64 for start in epoch) for epoch in epochs}) == 8


def test_seeds_differ() -> None:
    orders = [starts(next(BatchLoader(positions(10_000), 10, 32, seed))) for seed in range(8)]
    assert len({tuple(order) for order in orders}) == 8


def test_a_loader_is_its_own_iterator() -> None:
    loader = BatchLoader(positions(100), 10, 2, 0)
    assert [len(inputs) for inputs, _ in itertools.islice(loader, 20)] == [2] * 20
    assert loader.epoch == 40 // loader.windows


def test_a_state_of_other_data_is_refused() -> None:
    state = BatchLoader(positions(100), 10, 2, 0).state_dict()
    with pytest.raises(InputError, match="loader state: tokens: got 100; accepted: 101, as this run has"):
        BatchLoader(positions(101), 10, 2, 0).load_state_dict(state)
    with pytest.raises(InputError, match="loader state: context: got 10; accepted: 9"):
        BatchLoader(positions(100), 9, 2, 0).load_state_dict(state)
    loader = BatchLoader(positions(100), 10, 2, 0)
    with pytest.raises(InputError, match="loader state: position: got 9; accepted: a number below 9"):
        loader.load_state_dict({**state, "position": loader.windows})
    with pytest.raises(InputError, match="loader state: epoch: got -1"):
        loader.load_state_dict({**state, "epoch": -1})
    assert loader.state_dict() == state


@given(SHAPES, st.integers(1, 4), st.integers(1, 4), st.one_of(st.none(), st.integers(1, 5)))
@settings(deadline=None)
def test_evaluation_is_fixed_whole_and_the_same_for_any_ranks(shape, local: int, world: int, limit: int | None) -> None:
    context, count = shape
    batch, tokens = local * world, positions(count)
    alone = [starts(found) for found in evaluation_batches(tokens, context, batch, limit)]
    assert alone == [starts(found) for found in evaluation_batches(tokens, context, batch, limit)]
    parts = [list(evaluation_batches(tokens, context, batch, limit, rank, world)) for rank in range(world)]
    assert [list(itertools.chain(*map(starts, row))) for row in zip(*parts, strict=True)] == alone

    whole = (count - 1) // context // batch
    assert len(alone) == max(1, min(whole, limit or whole))
    flat = list(itertools.chain(*alone))
    assert len(flat) == len(alone) * batch
    assert flat[0] == 0
    assert flat == sorted(flat)
    if whole:
        assert (np.diff(flat) >= context).all(), "windows overlap"
    if len(flat) > 1:
        assert flat[-1] == count - 1 - context, "the end of the split is not covered"


def test_evaluation_targets_are_shifted_and_stop_at_the_last_token() -> None:
    for inputs, targets in evaluation_batches(positions(77), 8, 3):
        assert inputs.shape == targets.shape == (3, 8)
        assert torch.equal(targets, inputs + 1)
    assert targets.max() == 76


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context": 0}, "context: got 0; accepted: an integer ≥ 1"),
        ({"batch_size": 0}, "batch_size: got 0; accepted: an integer ≥ 1"),
        ({"batch_size": 2.0}, "batch_size: got 2.0"),
        ({"batch_size": 5, "world_size": 2}, r"batch_size: got 5; accepted: a multiple of the number of ranks \(2\)"),
        ({"rank": 2, "world_size": 2}, "rank: got 2; accepted: an integer from 0 to 1"),
        ({"world_size": 0}, "world_size: got 0"),
        ({"context": 100}, r"data: got '100 tokens'; accepted: at least 101 tokens \(context 100 \+ 1\)"),
    ],
)
def test_bad_arguments(change: dict, message: str) -> None:
    arguments = {"context": 10, "batch_size": 4, "rank": 0, "world_size": 1, **change}
    with pytest.raises(InputError, match=f"^{message}"):
        BatchLoader(positions(100), seed=0, **arguments)
    with pytest.raises(InputError, match=f"^{message}"):
        evaluation_batches(positions(100), **arguments)


def test_bad_seed_and_limit() -> None:
    with pytest.raises(InputError, match="seed: got -1"):
        BatchLoader(positions(100), 10, 4, -1)
    with pytest.raises(InputError, match="limit: got 0"):
        evaluation_batches(positions(100), 10, 4, limit=0)
