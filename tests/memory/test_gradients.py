"""Parked gradients: sums are autograd's own, and nothing can read a gradient that isn't there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiers import make_tier
from torch import Tensor, nn

from laneway.core import InputError, LanewayError
from laneway.memory.away import is_away
from laneway.memory.gradients import ParkedGradients
from laneway.memory.tier import Tier


@pytest.fixture(params=["disk", "host", "simulated"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tier]:
    made = make_tier(request.param, tmp_path)
    yield made
    assert made.used == 0
    made.close()


class Model(nn.Module):
    """A weight used twice, a scalar, a sparse gradient's embedding on the side, and one that only some batches reach."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 16, sparse=sparse)
        self.twice = nn.Linear(16, 16)
        self.out = nn.Linear(16, 4)
        self.sometimes = nn.Linear(16, 4)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.fixed = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, tokens: Tensor, detour: bool) -> Tensor:
        x = self.twice(self.twice(self.table(tokens)).tanh()) * self.scale
        return self.out(x) + self.fixed + (self.sometimes(x) if detour else 0.0)


def pair(sparse: bool = False) -> tuple[Model, Model]:
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(Model(sparse))
    return made[0], made[1]


def backward(model: Model, batches: range) -> None:
    for number in batches:
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(0, 20, (6,), generator=generator)
        model(tokens, detour=number % 3 == 1).square().mean().backward()


def gradients(model: Model) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.to_dense() if p.grad.is_sparse else p.grad for p in model.parameters()]


def equal(a: Model, b: Model) -> bool:
    return all((g is None and h is None) or torch.equal(g, h) for g, h in zip(gradients(a), gradients(b), strict=True))


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("window", [1, 1500, 1 << 20])
def test_sums_over_micro_batches_are_the_same_bits(tier: Tier, window: int, sparse: bool) -> None:
    alone, parked = pair(sparse)
    park = ParkedGradients(parked.parameters(), tier, window_bytes=window)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (alone, parked)]
    for step in range(5):
        for model in (alone, parked):
            backward(model, range(4 * step, 4 * step + 4))
        assert park.resident == 0
        assert tier.used > 0
        park.gather()
        assert tier.used == 0
        assert equal(alone, parked)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        assert all(torch.equal(p, q) for p, q in zip(alone.parameters(), parked.parameters(), strict=True))
    park.close()
    park.close()
    backward(alone, range(1))
    backward(parked, range(1))
    assert equal(alone, parked)


def test_few_gradients_are_here_at_a_time(tier: Tier) -> None:
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(10)])
    park = ParkedGradients(model.parameters(), tier, window_bytes=2 * 64 * 64 * 4)
    for _ in range(3):
        model(torch.randn(3, 64)).sum().backward()
    assert park.peak <= 5 * 64 * 64 * 4  # two leaving, two coming, the one that is being added to
    park.close()


def test_clipping_and_steps_without_gathering_raise(tier: Tier) -> None:
    alone, parked = pair()
    park = ParkedGradients(parked.parameters(), tier)
    for model in (alone, parked):
        backward(model, range(2))
    optimizer = torch.optim.AdamW(parked.parameters())
    assert is_away(parked.out.weight.grad)
    for use in (
        lambda: torch.nn.utils.clip_grad_norm_(parked.parameters(), 0.1),
        lambda: torch.nn.utils.clip_grad_value_(parked.parameters(), 0.1),
        optimizer.step,
        lambda: optimizer.zero_grad(set_to_none=False),
    ):
        with pytest.raises(LanewayError, match="in a tier"):
            use()
    norm = park.grad_norm()
    assert torch.equal(norm, torch.nn.utils.get_total_norm([p.grad for p in alone.parameters() if p.grad is not None]))
    clipped = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (alone, parked)]
    assert torch.equal(clipped[0], clipped[1])
    assert equal(alone, parked)
    park.close()


def test_gradients_that_were_thrown_away_or_replaced_do_not_come_back(tier: Tier) -> None:
    alone, parked = pair()
    park = ParkedGradients(parked.parameters(), tier)
    for model in (alone, parked):
        backward(model, range(3))
        model.zero_grad()
        backward(model, range(3, 5))
        model.out.weight.grad = torch.ones(4, 16)
        backward(model, range(5, 7))
    park.gather()
    assert equal(alone, parked)
    for model in (alone, parked):
        backward(model, range(2))
        model.zero_grad()
    park.gather()
    assert all(p.grad is None for p in parked.parameters())
    park.close()


def test_a_gradient_that_someone_else_holds_stays(tier: Tier) -> None:
    alone, parked = pair()
    park = ParkedGradients(parked.parameters(), tier)
    seen: list[Tensor] = []
    parked.out.weight.register_hook(seen.append)
    for model in (alone, parked):
        backward(model, range(1))
    expected = alone.out.weight.grad
    assert expected is not None
    assert torch.equal(seen[0], expected)
    for model in (alone, parked):
        backward(model, range(1, 3))
    park.gather()
    assert equal(alone, parked)
    park.close()


def test_a_full_tier_keeps_the_rest_here(tmp_path: Path) -> None:
    alone, parked = pair()
    tier = make_tier("host", tmp_path, 1100)
    park = ParkedGradients(parked.parameters(), tier)
    for model in (alone, parked):
        backward(model, range(4))
    assert 0 < tier.used <= 1100
    park.gather()
    assert equal(alone, parked)
    park.close()
    tier.close()


def test_bad_windows_are_refused(tier: Tier) -> None:
    with pytest.raises(InputError, match="window_bytes"):
        ParkedGradients([], tier, window_bytes=0)
