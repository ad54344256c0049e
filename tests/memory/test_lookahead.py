"""Batches in view before they are due, with a state that knows nothing of it."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laneway.core import InputError, LanewayError
from laneway.data.loader import BatchLoader
from laneway.memory.lookahead import LookAhead
from laneway.memory.signature import Signature

TOKENS = np.random.default_rng(0).integers(0, 250, 700).astype(np.uint16)


def loader() -> BatchLoader:
    return BatchLoader(TOKENS, context=8, batch_size=4, seed=3)


class Counting:
    """A loader with epochs of ``size`` batches and a state that stands in the object, as generators in ``__iter__`` make it."""

    def __init__(self, size: int = 10) -> None:
        self.size, self.position, self.epoch = size, 0, 0

    def __iter__(self):
        while self.position < self.size:
            self.position += 1
            yield np.full((1, self.position), 100 * self.epoch + self.position)
        self.position, self.epoch = 0, self.epoch + 1

    def __len__(self) -> int:
        return self.size

    def state_dict(self) -> dict:
        return {"position": self.position, "epoch": self.epoch}

    def load_state_dict(self, state: dict) -> None:
        self.position, self.epoch = state["position"], state["epoch"]


def equal(one, other) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 9), st.integers(0, 50), st.booleans())
def test_the_state_is_that_of_what_was_given_out(k, given_out, peek):
    plain, ahead = loader(), LookAhead(loader(), k)
    for _ in range(given_out):
        if peek:
            ahead.upcoming()
        assert equal(next(plain), next(ahead))
        assert ahead.state_dict() == plain.state_dict()
    if peek:
        ahead.upcoming()
    state = ahead.state_dict()
    assert state == plain.state_dict()
    resumed = LookAhead(loader(), k)
    resumed.upcoming()
    resumed.load_state_dict(state)
    for batch in itertools.islice(resumed, 12):
        assert equal(next(plain), batch)
    assert resumed.state_dict() == plain.state_dict()


def test_upcoming_are_the_next_batches_in_their_order():
    batches = [np.zeros((1, length), np.int64) for length in (5, 3, 9, 2)]
    ahead = LookAhead(iter(batches), 2)
    seen = []
    for batch in ahead:
        seen.append((batch.shape[1], [signature.length for signature in ahead.upcoming()]))
    assert seen == [(5, [3, 9]), (3, [9, 2]), (9, [2]), (2, [])]
    assert list(ahead) == []


def test_no_more_than_k_are_held():
    drawn = itertools.count()
    ahead = LookAhead((np.empty((1, next(drawn) + 1), np.int64) for _ in itertools.repeat(None)), 3)
    assert next(drawn) == 0, "nothing is fetched before it is asked for"
    next(ahead)
    assert next(drawn) == 5


def test_epochs_end_where_the_source_ends():
    plain, ahead = Counting(), LookAhead(Counting(), 4)
    for _ in range(3):
        assert [int(batch.flat[0]) for batch in ahead] == [int(batch.flat[0]) for batch in plain]
        assert ahead.state_dict() == plain.state_dict()
    assert len(ahead) == 10


@pytest.mark.parametrize("stop", [1, 7, 9, 10])
def test_a_loop_that_is_left_and_begun_again_loses_nothing(stop):
    ahead = LookAhead(Counting(), 4)
    ahead.upcoming()
    first = [int(batch.flat[0]) for batch in itertools.islice(iter(ahead), stop)]
    rest = [int(batch.flat[0]) for batch in ahead]
    assert first + rest == list(range(1, 11))


def test_a_source_without_state_starts_again_as_it_would_alone():
    batches = [np.zeros((1, length), np.int64) for length in range(1, 7)]
    ahead = LookAhead(batches, 3)
    for batch in ahead:
        if batch.shape[1] == 2:
            break
    assert [batch.shape[1] for batch in ahead] == [1, 2, 3, 4, 5, 6]
    with pytest.raises(LanewayError, match="list has no state_dict and load_state_dict"):
        ahead.state_dict()
    with pytest.raises(LanewayError, match="can't be resumed"):
        ahead.load_state_dict({})


def test_the_state_before_the_end_of_an_epoch_is_noticed():
    plain, ahead = Counting(3), LookAhead(Counting(3), 2)
    one, two = iter(plain), iter(ahead)
    for _ in range(3):
        next(one), next(two)
    assert ahead.state_dict() == plain.state_dict() == {"position": 3, "epoch": 0}
    for end in (one, two):
        with pytest.raises(StopIteration):
            next(end)
    assert ahead.state_dict() == plain.state_dict() == {"position": 0, "epoch": 1}


def test_an_error_comes_when_its_batch_is_due():
    def broken():
        yield np.zeros((1, 1), np.int64)
        yield np.zeros((1, 2), np.int64)
        raise OSError("disk gone")

    ahead = LookAhead(broken(), 5)
    assert [next(ahead).shape[1], next(ahead).shape[1]] == [1, 2]
    with pytest.raises(OSError, match="disk gone"):
        next(ahead)


def test_a_signature_may_be_made_otherwise():
    ahead = LookAhead(loader(), 2, sign=lambda batch: Signature.of(batch[0], tokens=99))
    assert [signature.tokens for signature in ahead.upcoming()] == [99, 99]


@pytest.mark.parametrize("k", [0, -1, 2.0])
def test_k_is_a_count(k):
    with pytest.raises(InputError, match="k: got"):
        LookAhead(loader(), k)
