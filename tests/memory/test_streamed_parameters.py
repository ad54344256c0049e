"""Streamed parameters: the same bits, tied and frozen and checkpointed alike, and no reading of what isn't there."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiers import make_tier
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from laneway.core import InputError, LanewayError
from laneway.memory.away import is_away
from laneway.memory.gradients import ParkedGradients
from laneway.memory.optimizer_state import StreamedOptimizerState
from laneway.memory.parameters import StreamedParameters
from laneway.memory.tier import Tier

WIDTH = 16


@pytest.fixture(params=["disk", "host", "simulated"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tier]:
    made = make_tier(request.param, tmp_path)
    yield made
    assert made.used == 0
    made.close()


class Out(nn.Module):
    """A head that holds the table's weight."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Block(nn.Module):
    """A parameter of its own beside those of its modules, a side output, and a module that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate = nn.Parameter(torch.randn(WIDTH))
        self.side = torch.zeros(())

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.inner(self.inner(self.norm(x)).tanh())
        self.side = (self.gate.exp() * 0.01).sum()
        return {"x": x + self.outer(y * self.gate).tanh_()}


class Model(nn.Module):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = Out(self.table.weight)
        self.recompute = recompute
        for p in self.blocks[1].parameters():
            p.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        side = torch.zeros(())
        for block in self.blocks:
            x = (checkpoint(block, x, use_reentrant=False) if self.recompute else block(x))["x"]
            side = side + block.side
        return self.head(x).logsumexp(-1).mean() + (0.0 if self.recompute else side)


def pair(make: Callable[[], nn.Module] = Model) -> tuple[Any, Any]:
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(make())
    return made[0], made[1]


def batch(number: int) -> Tensor:
    return torch.randint(0, 11, (3, 5), generator=torch.Generator().manual_seed(number))


def equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("window", [1, 3000, 1 << 20])
def test_the_same_bits_over_steps(tier: Tier, window: int, recompute: bool) -> None:
    alone, streamed = pair(lambda: Model(recompute))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (alone, streamed)]
    stream = StreamedParameters(streamed, tier, window_bytes=window, smallest=0)
    assert stream.resident == 0
    for number in range(6):
        losses = []
        for model in (alone, streamed):
            losses.append(model(batch(number)))
            losses[-1].backward()
        assert torch.equal(losses[0], losses[1])
        assert stream.resident == 0
        optimizers[0].step()
        with stream.all_here():
            optimizers[1].step()
            assert equal(alone, streamed)
        for optimizer in optimizers:
            optimizer.zero_grad()
        assert stream.resident == 0
    assert streamed.head.weight is streamed.table.weight
    assert tier.used == sum(p.numel() * 4 for p in streamed.parameters())  # tied weights once
    stream.close()
    stream.close()
    assert equal(alone, streamed)
    assert all(type(p) is nn.Parameter for p in streamed.parameters())


def test_few_parameters_are_here_at_a_time(tier: Tier) -> None:
    model = nn.Sequential(*[nn.Linear(32, 32, bias=False) for _ in range(12)])
    one = 32 * 32 * 4
    stream = StreamedParameters(model, tier, window_bytes=one)
    for _ in range(3):
        model(torch.randn(2, 32)).sum().backward()
    assert stream.peak <= 4 * one  # one at work, one coming, one leaving, one about to
    with torch.no_grad():
        model(torch.randn(2, 32))
    assert stream.resident <= 2 * one
    stream.send_all()
    assert stream.resident == 0
    stream.close()


def test_uses_outside_the_module_raise(tier: Tier) -> None:
    _, model = pair()
    stream = StreamedParameters(model, tier, smallest=0)
    weight = model.blocks[0].inner.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert is_away(weight)
    assert isinstance(weight, nn.Parameter)
    assert weight.shape == (WIDTH, WIDTH)
    model(batch(0)).backward()
    uses: list[Callable[[], Any]] = [
        lambda: weight + 1,
        lambda: weight.data,
        lambda: weight.norm(),
        lambda: F.linear(torch.ones(2, WIDTH), weight),
        lambda: copy.deepcopy(model),
        lambda: nn.init.zeros_(weight),
        lambda: model.to(torch.float64),
        optimizer.step,
    ]
    for use in uses:
        with pytest.raises(LanewayError, match="in a tier"):
            use()
    stream.close()
    assert float(weight.detach().norm()) > 0


def test_saving_and_loading(tier: Tier) -> None:
    alone, model = pair()
    stream = StreamedParameters(model, tier, smallest=0)
    saved = model.state_dict()
    assert all(torch.equal(saved[k], v) for k, v in alone.state_dict().items())
    saved = copy.deepcopy(saved)
    with torch.no_grad():
        model(batch(0))
        for p in alone.parameters():
            p.add_(1.0)
    stream.send_all()
    assert stream.resident == 0
    model.load_state_dict(alone.state_dict())
    assert torch.equal(model(batch(1)), alone(batch(1)))
    model.blocks[2].load_state_dict({k.removeprefix("blocks.2."): v for k, v in saved.items() if k.startswith("blocks.2.")})
    alone.blocks[2].load_state_dict({k.removeprefix("blocks.2."): v for k, v in saved.items() if k.startswith("blocks.2.")})
    assert torch.equal(model(batch(1)), alone(batch(1)))
    stream.close()


def test_two_backward_passes_through_one_graph(tier: Tier) -> None:
    alone, streamed = pair()
    stream = StreamedParameters(streamed, tier, smallest=0)
    for model in (alone, streamed):
        loss = model(batch(0))
        loss.backward(retain_graph=True)
        loss.backward()
        x = model.table(batch(1)).detach().requires_grad_()
        (g,) = torch.autograd.grad(model.blocks[0](x)["x"].sum(), x, create_graph=True)
        g.square().sum().backward()
    here = sum(p.numel() * 4 for p in streamed.blocks[0].parameters())
    assert stream.resident <= here  # what a graph of the second order may hold stays
    assert all(
        torch.equal(p.grad, q.grad) for p, q in zip(alone.parameters(), streamed.parameters(), strict=True) if p.grad is not None
    )
    stream.close()


def test_a_change_between_forward_and_backward_is_noticed_as_without(tier: Tier) -> None:
    for model in pair():
        stream = StreamedParameters(model, tier, smallest=0)
        loss = model(batch(0))
        with stream.all_here(), torch.no_grad():
            model.blocks[3].outer.weight.add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        stream.close()
    other = nn.Linear(WIDTH, WIDTH)
    stream = StreamedParameters(other, tier, smallest=0)
    x = torch.randn(2, WIDTH)
    loss = other(x).sum()
    x.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    stream.close()


def test_hooks_on_saved_tensors_outside_see_all_but_parameters(tier: Tier) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    storages = {p.untyped_storage()._cdata for p in model.parameters()}
    stream = StreamedParameters(model, tier, smallest=0)
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.detach())
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = model(torch.randn(2, WIDTH)).sum()
    loss.backward()
    assert len(packed) == 3
    assert not storages & {t.untyped_storage()._cdata for t in packed}
    stream.close()


def test_dropped_graphs_and_errors_leave_nothing_behind(tier: Tier) -> None:
    alone, streamed = pair()
    stream = StreamedParameters(streamed, tier, smallest=0)
    for number in range(3):
        loss = streamed(batch(number))
        del loss
        with pytest.raises(IndexError):
            streamed(torch.tensor([[99]]))
    gc.collect()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert sum(stream._saved.uses.values()) == 0
    for model in (alone, streamed):
        model(batch(0)).backward()
    assert stream.resident == 0
    assert all(
        torch.equal(p.grad, q.grad) for p, q in zip(alone.parameters(), streamed.parameters(), strict=True) if p.grad is not None
    )
    stream.close()


class Handing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(8, WIDTH))

    def forward(self, length: int) -> Tensor:
        return self.positions[:length]


def test_a_parameter_that_a_module_hands_out_stays(tier: Tier) -> None:
    module = Handing()
    stream = StreamedParameters(module, tier, smallest=0)
    view = module(3)
    assert stream.resident == module.positions.numel() * 4
    assert torch.equal(view, module.positions[:3])
    view.square().sum().backward()
    stream.close()


def test_memory_that_cannot_be_given_up_is_refused(tier: Tier) -> None:
    model = nn.Linear(WIDTH, WIDTH)
    model.weight.detach().numpy()
    with pytest.raises(InputError, match="weight"):
        StreamedParameters(model, tier, smallest=0)


def test_small_parameters_stay(tier: Tier) -> None:
    model = nn.Linear(WIDTH, WIDTH)
    stream = StreamedParameters(model, tier, smallest=WIDTH * WIDTH * 4)
    assert is_away(model.weight)
    assert not is_away(model.bias)
    stream.close()


def test_everything_in_a_tier_at_once(tier: Tier) -> None:
    alone, streamed = pair()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (alone, streamed)]
    state = StreamedOptimizerState(optimizers[1], tier, chunk_bytes=2000)
    stream = StreamedParameters(streamed, tier, smallest=0)
    park = ParkedGradients(streamed.parameters(), tier)
    for step in range(5):
        for model in (alone, streamed):
            for number in range(3):
                model(batch(3 * step + number)).backward()
        park.gather()
        with stream.all_here():
            norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5) for m in (alone, streamed)]
            assert torch.equal(norms[0], norms[1])
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert equal(alone, streamed)
    for each in (park, stream, state):
        each.close()
    assert tier.used == 0
