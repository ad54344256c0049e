"""Sampling: greedy, top-k and seeds do what they say, and the model never sees more than its context."""

import pytest
import torch
from torch import Tensor

from laneway.train.sample import generate_tokens, next_token

CPU = torch.device("cpu")


def successor(tokens_bt: Tensor) -> Tensor:
    """A model that is sure: after token i comes i + 1 of 10."""
    return torch.nn.functional.one_hot((tokens_bt + 1) % 10, 12).float() * 5


def write(model=successor, prompt=(3,), **options) -> list[int]:
    settings = {"max_tokens": 5, "context": 4, "vocabulary": 12, "device": CPU, "temperature": 0.0} | options
    return generate_tokens(model, list(prompt), **settings)


def test_greedy_takes_the_likeliest():
    assert write() == [4, 5, 6, 7, 8]
    assert write(prompt=[9, 9]) == [0, 1, 2, 3, 4]


def test_the_window_is_the_last_context_tokens():
    lengths = []

    def watch(tokens_bt: Tensor) -> Tensor:
        lengths.append((tokens_bt.shape[1], tokens_bt[0, 0].item()))
        return successor(tokens_bt)

    write(watch, prompt=[0, 1, 2])
    assert lengths == [(3, 0), (4, 0), (4, 1), (4, 2), (4, 3)]
    lengths.clear()
    write(watch, prompt=range(8), max_tokens=1)
    assert lengths == [(4, 4)]


def test_the_same_seed_gives_the_same_text():
    def flat(tokens_bt: Tensor) -> Tensor:
        return torch.zeros(*tokens_bt.shape, 12)

    first = write(flat, temperature=1.0, max_tokens=40, seed=5)
    assert first == write(flat, temperature=1.0, max_tokens=40, seed=5)
    assert first != write(flat, temperature=1.0, max_tokens=40, seed=6)
    assert set(first) > {0, 1}


def test_sampling_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    write(temperature=1.0)
    assert torch.equal(before, torch.get_rng_state())


def test_a_wide_head_is_cut_to_the_vocabulary():
    def beyond(tokens_bt: Tensor) -> Tensor:
        logits = torch.zeros(*tokens_bt.shape, 12)
        logits[..., 11] = 100.0
        logits[..., 2] = 1.0
        return logits

    assert write(beyond, vocabulary=11) == [2] * 5


@pytest.mark.parametrize(("top_k", "allowed"), [(1, {3}), (2, {3, 2}), (0, {0, 1, 2, 3}), (9, {0, 1, 2, 3})])
def test_top_k_draws_from_the_likeliest(top_k, allowed):
    generator = torch.Generator().manual_seed(0)
    drawn = {next_token(torch.tensor([0.0, 0.5, 1.0, 1.5]), 5.0, top_k, generator) for _ in range(200)}
    assert drawn == allowed


def test_temperature_sharpens():
    def share(temperature: float) -> float:
        generator = torch.Generator().manual_seed(0)
        return sum(next_token(torch.tensor([1.0, 0.0]), temperature, 0, generator) == 0 for _ in range(500)) / 500

    assert share(0.3) > 0.93 > share(1.0) > 0.66 > share(5.0) > 0.45


def test_bf16_logits_are_fine():
    generator = torch.Generator().manual_seed(0)
    assert next_token(torch.tensor([0.0, 50.0], dtype=torch.bfloat16), 1.0, 1, generator) == 1
