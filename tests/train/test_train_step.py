"""One optimizer step: accumulation is the whole batch, clipping is the formula, and a step that is not finite changes nothing."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor

from laneway.connections import HyperConnection
from laneway.models.gpt import GPT
from laneway.train.config import TrainConfig
from laneway.train.parallel import parallelise, resolve
from laneway.train.ranks import Ranks
from laneway.train.step import Stepper, token_loss
from laneway.train.workbench import make_optimizer

ALONE = Ranks(0, 0, 1, torch.device("cpu"))


def stepper(config: TrainConfig, model: GPT | None = None) -> Stepper:
    torch.manual_seed(0)
    parallel = parallelise(model or GPT(config.model), config, ALONE)
    optimizer = make_optimizer(parallel, config.optimizer)
    return Stepper(parallel, optimizer, ALONE, config.micro_batch(), config.optimizer.clip_norm)


def batch(config: TrainConfig, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 256, (config.batch_size, config.model.context + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def take(step: Stepper, config: TrainConfig, count: int = 3) -> list[float]:
    return [step(batch(config, seed), 1e-2, False, lambda: None).loss for seed in range(count)]


def gradients(step: Stepper, config: TrainConfig) -> dict[str, Tensor]:
    seen: dict[str, Tensor] = {}

    def remember() -> None:
        seen.update({name: p.grad.clone() for name, p in step.parallel.model.named_parameters() if p.grad is not None})

    step(batch(config), 0.0, False, remember)
    return seen


def test_token_loss_is_the_mean_in_nats():
    logits = torch.randn(2, 3, 5, dtype=torch.bfloat16)
    targets = torch.randint(0, 5, (2, 3))
    expected = -logits.double().log_softmax(-1).gather(-1, targets[..., None]).mean()
    assert token_loss(logits, targets).dtype == torch.float32
    torch.testing.assert_close(token_loss(logits, targets).double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(token_loss(logits, targets, "sum"), token_loss(logits, targets) * 6)


def test_the_loss_of_a_step_is_that_of_its_batch(config):
    step = stepper(config)
    inputs, targets = batch(config)
    with torch.no_grad():
        expected = float(token_loss(step.parallel.model(inputs), targets))
    assert take(step, config, 1) == [pytest.approx(expected, rel=1e-6)]


@pytest.mark.parametrize("micro", [1, 2, 4])
def test_accumulation_equals_the_whole_batch(change, micro):
    whole, parts = gradients(stepper(change()), change()), gradients(stepper(change(micro_batch_size=micro)), change())
    assert whole.keys() == parts.keys()
    for name in whole:
        torch.testing.assert_close(parts[name], whole[name], rtol=2e-4, atol=2e-7)


def test_steps_lower_the_loss_of_a_batch(config):
    step = stepper(config)
    losses = [step(batch(config), 1e-2, False, lambda: None).loss for _ in range(15)]
    assert losses[-1] < losses[0] - 0.5


def test_the_learning_rate_is_the_one_that_was_given(config):
    step = stepper(config)
    before = copy.deepcopy(step.parallel.model.state_dict())
    step(batch(config), 0.0, False, lambda: None)
    assert all(torch.equal(before[name], value) for name, value in step.parallel.model.state_dict().items())
    step(batch(config), 1e-3, False, lambda: None)
    moved = step.parallel.model.state_dict()
    assert any(not torch.equal(before[name], value) for name, value in moved.items())
    assert {group["lr"] for group in step.optimizer.param_groups} == {1e-3}


def test_gradients_are_clipped_to_the_global_norm(change):
    config = change(optimizer={"clip_norm": 0.01})
    step = stepper(config)
    norms: list[float] = []
    update = step.optimizer.step

    def watch(*args: object, **options: object) -> object:
        norms.append(math.sqrt(sum(float(p.grad.square().sum()) for p in step.parallel.model.parameters() if p.grad is not None)))
        return update(*args, **options)

    step.optimizer.step = watch
    outcome = step(batch(config), 1e-3, False, lambda: None)
    assert outcome.grad_norm > 0.1  # what is reported is the norm before clipping
    assert norms == [pytest.approx(0.01, rel=1e-3)]
    assert stepper(change(optimizer={"clip_norm": 0.0}))(batch(config), 1e-3, False, lambda: None).grad_norm == outcome.grad_norm


@pytest.mark.parametrize("place", ["loss", "gradient"])
def test_a_step_that_is_not_finite_changes_nothing(config, place):
    step = stepper(config)
    take(step, config, 1)  # so that the optimizer has a state that could change
    before = copy.deepcopy((step.parallel.model.state_dict(), step.optimizer.state_dict()["state"]))
    weight = step.parallel.model.blocks[0].ffn.out.weight
    if place == "loss":
        handle = step.parallel.model.norm.register_forward_hook(lambda module, args, output: output * float("inf"))
    else:
        handle = weight.register_hook(lambda grad: grad * float("nan"))
    outcome = step(batch(config), 1e-2, False, lambda: None)
    handle.remove()
    assert not outcome.finite
    assert math.isfinite(outcome.loss) == (place == "gradient")
    for name, value in step.parallel.model.state_dict().items():
        assert torch.equal(value, before[0][name]), name
    for index, state in step.optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, before[1][index][key]) for key, value in state.items())
    assert step(batch(config), 1e-2, False, lambda: None).finite
    assert weight.grad is None


def test_a_stop_request_comes_back(config):
    step = stepper(config)
    assert not step(batch(config), 1e-3, False, lambda: None).stop
    assert step(batch(config), 1e-3, True, lambda: None).stop


def test_bf16_computes_in_bf16_and_keeps_fp32_parameters(change):
    wide, narrow = stepper(change()), stepper(change(precision="bf16"))
    seen = set()
    narrow.parallel.model.blocks[0].ffn.register_forward_hook(lambda module, args, output: seen.add(output.dtype))
    losses, expected = take(narrow, change()), take(wide, change())
    assert seen == {torch.bfloat16}
    assert {p.dtype for p in narrow.parallel.model.parameters()} == {torch.float32}
    assert losses != expected
    assert losses == pytest.approx(expected, rel=2e-2)


@pytest.mark.parametrize("residual", ["residual", "hc", "mhc"])
def test_activation_checkpointing_changes_no_bit(change, residual):
    plain, kept = change(model={"residual": residual}), change(model={"residual": residual}, activation_checkpointing=True)
    assert take(stepper(plain), plain) == take(stepper(kept), kept)


def test_activation_checkpointing_computes_blocks_twice(change):
    calls = dict.fromkeys((False, True), 0)
    for on in calls:
        step = stepper(change(activation_checkpointing=on))

        def count(*_: object, on: bool = on) -> None:
            calls[on] += 1

        for module in step.parallel.model.modules():
            if isinstance(module, HyperConnection):
                module.register_forward_hook(count)
        take(step, change(), 1)
    assert calls[True] == 2 * calls[False]


def test_activation_checkpointing_keeps_the_names(change):
    plain, kept = GPT(change().model), GPT(change().model)
    parallelise(kept, change(activation_checkpointing=True), ALONE)
    assert list(plain.state_dict()) == list(kept.state_dict())


@pytest.mark.parametrize(
    ("kind", "ranks", "expected"),
    [("auto", 1, "none"), ("auto", 2, "ddp"), ("none", 1, "none"), ("ddp", 2, "ddp"), ("fsdp", 2, "fsdp")],
)
def test_parallelism_follows_the_number_of_ranks(kind, ranks, expected):
    assert resolve(kind, ranks) == expected


@pytest.mark.parametrize(("kind", "ranks"), [("none", 2), ("ddp", 1), ("fsdp", 1)])
def test_parallelism_that_cannot_work_is_refused(kind, ranks):
    with pytest.raises(ValueError, match="parallel: got"):
        resolve(kind, ranks)
