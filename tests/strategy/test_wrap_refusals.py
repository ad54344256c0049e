"""What only shows once there are ranks: sizes that do not divide, plans that are missing, batches too small for a pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

from laneway.cluster.layout import Layout
from laneway.core import InputError, LanewayError
from laneway.models.gpt import GPT, GPTConfig
from laneway.strategy.dry_run import _fake_ranks
from laneway.strategy.wrap import wrap_model

CONFIG = GPTConfig(vocab_size=24, context=8, layers=4, heads=4, dim=16, ffn_dim=32)
PLAIN = Layout(precision="fp32")


@pytest.fixture(autouse=True)
def _two_ranks() -> Iterator[None]:
    """Rank 0 of two, on a process group that moves nothing."""
    with _fake_ranks(0, 2):
        yield


class Planned(nn.Module):
    """With a plan as transformers' models have."""

    def __init__(self, style: str | None) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.config = object()
        self.tp_plan = {"u*": style} if style else None


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: GPT(replace(CONFIG, heads=1)), "layout.tp: got 2; accepted: a divisor of the model's heads = 1"),
        (lambda: GPT(replace(CONFIG, vocab_size=25)), "layout.tp: got 2; accepted: a divisor of the model's vocab_size = 25"),
        (lambda: GPT(replace(CONFIG, ffn_dim=33)), "layout.tp: got 2; accepted: a divisor of the model's hidden = 33"),
        (lambda: Planned(None), "layout.tp: got 'Planned'; accepted: 1, or a model that gives a plan"),
        (lambda: Planned("packed_colwise"), "layout.tp: got 'up: packed_colwise'; accepted: 1, or a model whose plan has only"),
    ],
)
def test_what_can_not_be_split_is_refused(model, message):
    with pytest.raises(InputError) as error:
        wrap_model(model(), replace(PLAIN, tp=2), device="cpu")
    assert str(error.value).startswith(message)


def test_a_plan_of_a_model_is_followed():
    wrapped = wrap_model(Planned("colwise"), replace(PLAIN, tp=2), device="cpu")
    assert wrapped.module.up.weight.to_local().shape == (4, 4)


def test_sequences_that_ranks_do_not_divide_are_refused():
    wrapped = wrap_model(GPT(CONFIG), replace(PLAIN, tp=2, sequence_parallel=True), device="cpu")
    with pytest.raises(InputError, match=r"tokens: got \[1, 7\]; accepted: \[b, t\] with t a multiple of tp = 2"):
        wrapped(torch.zeros(1, 7, dtype=torch.int64))


def test_a_pipeline_says_what_it_needs():
    staged = wrap_model(GPT(CONFIG), replace(PLAIN, pp=2, micro_batch=3), device="cpu")
    tokens = torch.zeros(3, 8, dtype=torch.int64)
    with pytest.raises(InputError, match="batch: got 3; accepted: at least pp × micro_batch = 6 rows; 1 micro-batches do not"):
        staged.step(tokens, tokens)
    with pytest.raises(LanewayError, match=r"train with loss = model.step\(inputs, targets\)"):
        staged(tokens)
    chunked = wrap_model(GPT(CONFIG), replace(PLAIN, pp=2, chunks=2), device="cpu")
    with pytest.raises(InputError, match="batch: got 3; accepted: a multiple of pp × micro_batch = 2 rows"):
        chunked.step(tokens, tokens)
    with pytest.raises(InputError, match=r"layout.pp: got 6; accepted: at most the model's 4 layers"):
        wrap_model(GPT(CONFIG), replace(PLAIN, pp=2, chunks=3), device="cpu")


def test_stages_take_their_part_of_a_whole_state():
    whole = GPT(CONFIG)
    staged = wrap_model(GPT(CONFIG), replace(PLAIN, pp=2), device="cpu")
    staged.load_state_dict(whole.state_dict())
    mine = staged.state_dict()
    assert {name.split(".")[1] for name in mine if name.startswith("blocks.")} == {"0", "1"}
    assert all(torch.equal(value, whole.state_dict()[name]) for name, value in mine.items())


def test_a_copy_of_the_embedding_never_decays_alone():
    """The head's copy and the embedding must take the same steps."""
    with torch.no_grad():
        stage = wrap_model(GPT(CONFIG), replace(PLAIN, pp=2), device="cpu", order=[1, 0])  # so rank 0 has the last stage
    assert stage.stages[0].last
    decay = {id(p): group["weight_decay"] for group in stage.param_groups(0.1) for p in group["params"]}
    assert decay[id(stage.stages[0].head.weight)] == 0.0
    assert 0.1 in decay.values()
