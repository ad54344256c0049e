"""Stages one after the other in one process: the same function as the model they were cut from."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from laneway.core import InputError
from laneway.models.gpt import GPT, GPTConfig
from laneway.strategy.stages import GPTStage, layers_of_stage


@given(st.integers(1, 40), st.integers(1, 40))
def test_stages_divide_the_layers(layers, stages):
    if stages > layers:
        with pytest.raises(InputError, match=r"layout.pp: got"):
            layers_of_stage(layers, stages, 0)
        return
    parts = [list(layers_of_stage(layers, stages, index)) for index in range(stages)]
    assert [layer for part in parts for layer in part] == list(range(layers))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(
    ("residual", "stages", "chained"), [("mhc", 3, True), ("mhc", 2, False), ("hc", 3, False), ("residual", 1, True)]
)
def test_staged_is_monolithic_bit_for_bit(residual, stages, chained):
    model = GPT(GPTConfig(vocab_size=11, context=6, layers=3, heads=2, dim=8, residual=residual))
    model.chained = chained
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    tokens, pull = torch.randint(0, 11, (2, 6)), torch.randn(2, 6, 11)
    whole = copy.deepcopy(model)
    logits = whole(tokens)
    (logits * pull).sum().backward()
    x, cut = tokens, [GPTStage(model, index, stages) for index in range(stages)]
    for index, stage in enumerate(cut):
        x = stage(x)
        assert x.shape == stage.shapes(2, 6, x.dtype)[1].shape
        assert (x.ndim == 4) == (index < stages - 1)  # n·C between stages, logits at the end
    (x * pull).sum().backward()
    assert torch.equal(x, logits)
    want = {name: parameter.grad for name, parameter in whole.named_parameters()}
    if stages > 1:
        assert cut[0].embedding.weight is not cut[-1].head.weight
        cut[0].embedding.weight.grad += cut[-1].head.weight.grad
        cut[-1].head.weight.grad = cut[0].embedding.weight.grad
        want["head.weight"] = want["embedding.weight"]
    for stage in cut:
        for name, parameter in stage.named_parameters():
            assert torch.equal(parameter.grad, want[name]), name


def test_only_the_first_stage_expands_and_only_the_last_reads_out():
    model = GPT(GPTConfig(vocab_size=11, context=6, layers=4, heads=2, dim=8))
    cut = [GPTStage(model, index, 4) for index in range(4)]
    assert [stage.embedding is not None for stage in cut] == [True, False, False, False]
    assert [stage.readout is not None for stage in cut] == [stage.head is not None for stage in cut] == [False] * 3 + [True]
    assert [stage.tied for stage in cut] == [True, False, False, True]
    names = [name for stage in cut for name, _ in stage.named_parameters()]
    assert sorted(names) == sorted([*dict(model.named_parameters()), "head.weight"])
