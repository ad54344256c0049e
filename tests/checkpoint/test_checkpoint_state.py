"""capture and restore: going on from a checkpoint is the same, bit for bit, as never having stopped."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from laneway.checkpoint import CheckpointStore, capture, capture_rng, restore, restore_rng
from laneway.core import LanewayError


class Net(nn.Module):
    """Tied weights, a buffer, dropout (so that the generators matter), a parameter without a gradient, a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Parameter(torch.ones(2))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.norm(self.embed(tokens)))) * self.frozen.sum()


OPTIMIZERS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.03, betas=(0.8, 0.9)),
    "adamw amsgrad": lambda groups: torch.optim.AdamW(groups, lr=0.03, amsgrad=True),
    "adamw, rate in a tensor": lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(0.03), foreach=False),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.03),
    "sgd with momentum": lambda groups: torch.optim.SGD(groups, lr=0.03, momentum=0.9),
}


def build(name: str, seed: int, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net().to(dtype)
    groups = [
        {"params": [model.embed.weight], "weight_decay": 0.1},
        {"params": [model.norm.weight, model.norm.bias, model.unused, model.frozen], "weight_decay": 0.0},
    ]
    return model, OPTIMIZERS[name](groups)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        shift = random.randrange(11) + np.random.randint(3)
        tokens = (torch.randint(0, 11, (8,)) + shift) % 11
        loss = nn.functional.cross_entropy(model(tokens).float(), tokens)
        loss.backward()
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] * 0.9
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_same(left, right) -> None:
    assert left.keys() == right.keys()
    for key, value in left.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == right[key].dtype
            assert torch.equal(value, right[key]), key
        elif isinstance(value, dict):
            assert_same(value, right[key])
        else:
            assert value == right[key], key


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_going_on_is_the_same_as_never_having_stopped(store, name, dtype):
    seed_all(3)
    model, optimizer = build(name, 0, dtype)
    train(model, optimizer, 5)
    store.save(5, capture(model, optimizer, {"cursor": 40}, capture_rng()))
    expected = train(model, optimizer, 5)
    seed_all(9)
    again, again_optimizer = build(name, 1, dtype)
    found = restore(store, None, again, again_optimizer)
    restore_rng(found.per_rank)
    assert (found.step, found.extras) == (5, {"cursor": 40})
    assert train(again, again_optimizer, 5) == expected
    assert_same(model.state_dict(), again.state_dict())
    assert_same(optimizer.state_dict()["state"], again_optimizer.state_dict()["state"])
    assert again.head.weight is again.embed.weight
    for left, right in zip(optimizer.param_groups, again_optimizer.param_groups, strict=True):
        assert {**left, "params": 0} == {**right, "params": 0}
        assert type(left["lr"]) is type(right["lr"])


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_checkpoint_before_the_first_step_changes_nothing(store, name):
    """torch makes a step to have an optimizer state to save; it must not count."""
    seed_all(3)
    plain, plain_optimizer = build(name, 0)
    expected = train(plain, plain_optimizer, 3)
    seed_all(3)
    model, optimizer = build(name, 0)
    rng = capture_rng()
    store.save(0, capture(model, optimizer))
    assert not optimizer.state
    assert train(model, optimizer, 3) == expected
    again, again_optimizer = build(name, 1)
    restore(store, 0, again, again_optimizer)
    restore_rng(rng)
    assert train(again, again_optimizer, 3) == expected


def test_capture_in_the_middle_changes_nothing(store):
    seed_all(3)
    plain, plain_optimizer = build("adamw", 0)
    expected = train(plain, plain_optimizer, 6)
    seed_all(3)
    model, optimizer = build("adamw", 0)
    losses = []
    for step in range(6):
        losses += train(model, optimizer, 1)
        store.save(step, capture(model, optimizer, per_rank=capture_rng()))
    assert losses == expected


def test_restore_over_a_trained_model_forgets_it(store):
    seed_all(3)
    model, optimizer = build("adamw", 0)
    train(model, optimizer, 2)
    store.save(2, capture(model, optimizer))
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    train(model, optimizer, 3)
    model(torch.arange(11)).sum().backward()  # gradients that belong to no step
    restore(store, 2, model, optimizer)
    assert_same(weights, model.state_dict())
    assert all(entry["step"] == 2 for entry in optimizer.state.values())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_model_alone(store):
    model, optimizer = build("adamw", 0)
    train(model, optimizer, 1)
    store.save(1, capture(model, optimizer, {"a": 1}))
    again, _ = build("adamw", 1)
    found = restore(store, None, again)
    assert_same(model.state_dict(), again.state_dict())
    assert found.extras == {"a": 1}
    assert found.per_rank is None


def test_names_do_not_depend_on_the_wrapping(store):
    """A compiled model's checkpoint loads into a plain one."""
    model, optimizer = build("adamw", 0)
    train(model, optimizer, 1)
    compiled = torch.compile(model, backend="eager")
    state = capture(compiled, optimizer)
    assert not [name for name in state["model"] if "_orig_mod" in name]
    store.save(1, state)
    again, again_optimizer = build("adamw", 1)
    restore(store, 1, again, again_optimizer)
    assert_same(model.state_dict(), again.state_dict())


def test_what_does_not_fit_the_optimizer_is_a_clear_error(store):
    model, optimizer = build("adamw", 0)
    train(model, optimizer, 1)
    store.save(1, capture(model, optimizer))
    before = {name: value.clone() for name, value in build("adamw", 1)[0].state_dict().items()}
    again, _ = build("adamw", 1)
    with pytest.raises(LanewayError, match="parameter groups hold other parameters"):
        restore(store, 1, again, torch.optim.AdamW(again.parameters()))
    again, other = build("sgd with momentum", 1)
    with pytest.raises(LanewayError, match=r"optimizer/state/embed\.weight/momentum_buffer is not in the checkpoint"):
        restore(store, 1, again, other)
    assert_same(before, again.state_dict())
    again.extra = nn.Parameter(torch.ones(3))
    with pytest.raises(LanewayError, match="model/extra is not in the checkpoint"):
        restore(store, 1, again)


def test_nothing_to_restore(run):
    model, optimizer = build("adamw", 0)
    with pytest.raises(LanewayError, match="no checkpoint to load"):
        restore(CheckpointStore(run), None, model, optimizer)


def test_generators_go_on_where_they_were(store):
    seed_all(5)
    store.save(1, {"rng": capture_rng()})
    expected = (random.random(), np.random.normal(), torch.randn(3), random.gauss(0, 1))
    seed_all(6)
    state = {"rng": None}
    store.load(1, state)
    restore_rng(state["rng"])
    assert (random.random(), np.random.normal()) == expected[:2]
    assert torch.equal(torch.randn(3), expected[2])
    assert random.gauss(0, 1) == expected[3]
