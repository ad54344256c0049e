"""Streamed optimizer state: the same bits as the optimizer alone, whatever the tier, and never more than two chunks here."""

from __future__ import annotations

import copy
import errno
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import make_tier
from torch import Tensor, nn

from laneway.core import InputError, LanewayError
from laneway.memory import backing
from laneway.memory.optimizer_state import StreamedOptimizerState
from laneway.memory.tier import Tier

Make = Callable[[Any], torch.optim.Optimizer]
CHUNK = 40_000


def without_empty(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [group | {"params": [p for p in group["params"] if p.numel()]} for group in groups]


OPTIMIZERS: dict[str, Make] = {
    "adamw loop": lambda g: torch.optim.AdamW(g, lr=1e-2, foreach=False, fused=False),
    "adamw foreach": lambda g: torch.optim.AdamW(g, lr=1e-2, foreach=True),
    "adamw fused": lambda g: torch.optim.AdamW(g, lr=1e-2, fused=True),
    "adamw amsgrad": lambda g: torch.optim.AdamW(g, lr=1e-2, amsgrad=True, weight_decay=0.1),
    "sgd": lambda g: torch.optim.SGD(g, lr=1e-2, momentum=0.9, nesterov=True),
    "sgd plain": lambda g: torch.optim.SGD(g, lr=1e-2),
    "rmsprop": lambda g: torch.optim.RMSprop(g, lr=1e-3, momentum=0.5, centered=True),
    "adagrad": lambda g: torch.optim.Adagrad(g, lr=1e-2),
    "nadam": lambda g: torch.optim.NAdam(g, lr=1e-3),
    "radam": lambda g: torch.optim.RAdam(g, lr=1e-3),
    "adadelta": lambda g: torch.optim.Adadelta(g),
    "rprop": lambda g: torch.optim.Rprop(g),
    "asgd": lambda g: torch.optim.ASGD(g),
    "adamax": lambda g: torch.optim.Adamax(g),
    "adafactor": lambda g: torch.optim.Adafactor(without_empty(g)),  # it divides by the number of elements
}


class Model(nn.Module):
    """Parameters of many sizes: a scalar, an empty one, one that never gets a gradient, and one of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.unused = nn.Parameter(torch.randn(7))
        self.low = nn.Parameter(torch.randn(8, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * self.scale + self.low.float() + self.empty.sum()


def groups(model: Model) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "lr": 3e-3},
    ]


class Run:
    """A model, its optimizer, and steps on batches that depend on the number of the step only."""

    def __init__(self, make: Make, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = Model()
        self.optimizer = make(groups(self.model))
        self.number = 0

    def backward(self, scaler: torch.amp.GradScaler | None = None) -> None:
        generator = torch.Generator().manual_seed(self.number)
        self.number += 1
        loss = self.model(torch.randn(5, 16, generator=generator)).square().mean()
        (loss if scaler is None else scaler.scale(loss)).backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def parameters(self) -> list[Tensor]:
        return [p.detach() for p in self.model.parameters()]


def equal(a: Run, b: Run) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def same_state(a: dict[str, Any], b: dict[str, Any]) -> bool:
    assert a["param_groups"] == b["param_groups"]
    assert a["state"].keys() == b["state"].keys()
    for key, entry in a["state"].items():
        assert list(entry) == list(b["state"][key])
        for name, value in entry.items():
            other = b["state"][key][name]
            same = torch.equal(value, other) and value.dtype == other.dtype if isinstance(value, Tensor) else value == other
            assert same, (key, name)
    return True


@pytest.fixture(params=["disk", "host", "simulated"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tier]:
    made = make_tier(request.param, tmp_path)
    yield made
    assert made.used == 0
    made.close()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_bits_as_the_optimizer_alone(name: str, tier: Tier) -> None:
    alone, run = Run(OPTIMIZERS[name]), Run(OPTIMIZERS[name])
    streamed = StreamedOptimizerState(run.optimizer, tier, chunk_bytes=CHUNK)
    for _ in range(6):
        alone.step()
        run.step()
        assert equal(alone, run)
        assert streamed.resident == 0
    assert streamed.peak <= 2 * CHUNK
    assert same_state(alone.optimizer.state_dict(), run.optimizer.state_dict())
    streamed.close()
    streamed.close()
    assert "step" not in run.optimizer.__dict__
    alone.step()
    run.step()
    assert equal(alone, run)
    assert same_state(alone.optimizer.state_dict(), run.optimizer.state_dict())


@pytest.mark.parametrize("chunk", [1, 3_000, 12_000, 10**7])
def test_never_more_than_two_chunks_or_one_parameter(chunk: int, tier: Tier) -> None:
    run = Run(OPTIMIZERS["adamw amsgrad"])
    largest = 3 * max(p.numel() * p.element_size() for p in run.model.parameters())
    streamed = StreamedOptimizerState(run.optimizer, tier, chunk_bytes=chunk)
    for _ in range(3):
        run.step()
    total = 3 * sum(
        p.numel() * p.element_size() for p in run.model.parameters() if p.grad is None and p.dim() and p is not run.model.unused
    )
    assert streamed.peak <= max(2 * chunk, largest)
    assert streamed.peak <= total
    assert tier.used == total
    streamed.close()
    assert streamed.tier.used == 0


def test_bytes_moved_are_those_of_the_state_and_scalars_stay(tier: Tier) -> None:
    run = Run(OPTIMIZERS["adamw foreach"])
    streamed = StreamedOptimizerState(run.optimizer, tier, chunk_bytes=CHUNK)
    run.step()
    state = 2 * sum(p.numel() * p.element_size() for p in run.model.parameters() if p.dim() and p is not run.model.unused)
    assert (tier.traffic.bytes_written, tier.traffic.bytes_read) == (state, 0)
    scalars = [entry["step"] for entry in run.optimizer.state.values()]
    run.step()
    assert (tier.traffic.bytes_written, tier.traffic.bytes_read) == (2 * state, state)
    assert all(entry["step"] is s and float(s) == 2.0 for entry, s in zip(run.optimizer.state.values(), scalars, strict=True))
    streamed.close()


def test_state_that_is_away_cannot_be_used_by_mistake(tier: Tier) -> None:
    run = Run(OPTIMIZERS["adamw loop"])
    streamed = StreamedOptimizerState(run.optimizer, tier, chunk_bytes=CHUNK)
    run.step()
    parameter = run.model.layers[0].weight
    average = run.optimizer.state[parameter]["exp_avg"]
    assert average.shape == parameter.shape
    assert "in a tier" in repr(average)
    uses: list[Callable[[], Any]] = [
        lambda: average + 1,
        average.zero_,
        average.clone,
        average.tolist,
        lambda: torch.norm(average),
        lambda: torch._foreach_norm([average]),
        lambda: torch.save(average, io.BytesIO()),
        lambda: copy.deepcopy(run.optimizer),
    ]
    for use in uses:
        with pytest.raises(LanewayError, match="in a tier"):
            use()
    streamed.close()
    assert float(average.norm()) > 0
    assert type(average) is Tensor


@pytest.mark.parametrize("first", ["scheduler", "stream"])
@pytest.mark.parametrize("name", ["adamw loop", "adamw fused"])
def test_schedulers_and_hooks_see_one_step(first: str, name: str, tier: Tier) -> None:
    alone, run = Run(OPTIMIZERS[name]), Run(OPTIMIZERS[name])

    def schedule(of: Run) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.CosineAnnealingLR(of.optimizer, 5)

    if first == "scheduler":
        schedulers = [schedule(alone), schedule(run)]
        streamed = StreamedOptimizerState(run.optimizer, tier, chunk_bytes=3_000)
    else:
        streamed = StreamedOptimizerState(run.optimizer, tier, chunk_bytes=3_000)
        schedulers = [schedule(alone), schedule(run)]
    calls: list[str] = []
    run.optimizer.register_step_pre_hook(lambda o, a, k: calls.append(f"before {len(o.param_groups[0]['params'])}"))
    run.optimizer.register_step_post_hook(lambda o, a, k: calls.append(f"after {len(o.param_groups[0]['params'])}"))
    for _ in range(5):
        for each, scheduler in zip((alone, run), schedulers, strict=True):
            each.step()
            scheduler.step()
        assert equal(alone, run)
    count = len(run.optimizer.param_groups[0]["params"])
    assert calls == [f"before {count}", f"after {count}"] * 5
    streamed.close()
    alone.step()
    run.step()
    assert equal(alone, run)


@pytest.mark.parametrize("name", ["adamw loop", "adamw fused", "sgd"])
def test_gradient_scaling(name: str, tier: Tier) -> None:
    alone, run = Run(OPTIMIZERS[name]), Run(OPTIMIZERS[name])
    streamed = StreamedOptimizerState(run.optimizer, tier, chunk_bytes=3_000)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2) for _ in range(2)]
    for number in range(6):
        for each, scaler in zip((alone, run), scalers, strict=True):
            each.backward(scaler)
            if number == 3:
                each.model.layers[0].weight.grad[0, 0] = float("inf")
            scaler.step(each.optimizer)
            scaler.update()
            each.optimizer.zero_grad()
        assert equal(alone, run)
        assert scalers[0].get_scale() == scalers[1].get_scale()
    assert same_state(alone.optimizer.state_dict(), run.optimizer.state_dict())
    streamed.close()


@pytest.mark.parametrize("name", ["adamw foreach", "adamw amsgrad", "sgd", "adafactor"])
def test_resuming_goes_on_with_the_same_bits(name: str, tier: Tier, tmp_path: Path) -> None:
    alone, run = Run(OPTIMIZERS[name]), Run(OPTIMIZERS[name])
    streamed = StreamedOptimizerState(run.optimizer, tier, chunk_bytes=CHUNK)
    for _ in range(3):
        alone.step()
        run.step()
    torch.save({"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}, tmp_path / "run.pt")
    run.step()
    assert streamed.resident == 0
    streamed.close()

    resumed = Run(OPTIMIZERS[name], seed=1)
    resumed.step()  # has state of its own, which has to go
    again = StreamedOptimizerState(resumed.optimizer, tier, chunk_bytes=CHUNK)
    saved = torch.load(tmp_path / "run.pt")
    before = copy.deepcopy(saved["optimizer"])
    resumed.model.load_state_dict(saved["model"])
    resumed.optimizer.load_state_dict(saved["optimizer"])
    assert again.resident == 0
    assert again.peak <= max(p.numel() * p.element_size() for p in resumed.model.parameters())  # one tensor at a time
    assert same_state(saved["optimizer"], before)
    assert same_state(resumed.optimizer.state_dict(), before)
    resumed.number = 3
    for _ in range(5):
        alone.step()
        resumed.step()
        assert equal(alone, resumed)
    for key, entry in before["state"].items():  # scalars are torch's to load: it takes the saved tensor itself
        for name, value in entry.items():
            if isinstance(value, Tensor) and value.dim():
                assert torch.equal(saved["optimizer"]["state"][key][name], value)
    again.close()


def test_loading_a_state_that_does_not_fit_changes_nothing(tier: Tier) -> None:
    alone, run = Run(OPTIMIZERS["adamw loop"]), Run(OPTIMIZERS["adamw loop"])
    streamed = StreamedOptimizerState(run.optimizer, tier, chunk_bytes=CHUNK)
    alone.step()
    run.step()
    wrong = torch.optim.AdamW([nn.Parameter(torch.ones(3))]).state_dict()
    with pytest.raises(ValueError, match="different number of parameter groups"):
        run.optimizer.load_state_dict(wrong)
    alone.step()
    run.step()
    assert equal(alone, run)
    streamed.close()


def test_parameters_that_come_later_and_gradients_that_come_late(tier: Tier) -> None:
    alone, run = Run(OPTIMIZERS["adamw loop"]), Run(OPTIMIZERS["adamw loop"])
    streamed = StreamedOptimizerState(run.optimizer, tier, chunk_bytes=3_000)
    for number in range(5):
        for each in (alone, run):
            if number == 2:
                torch.manual_seed(5)
                each.model.late = nn.Linear(8, 8)
                each.optimizer.add_param_group({"params": list(each.model.late.parameters()), "lr": 1e-3})
            each.backward()
            if number == 3:
                each.model.unused.grad = torch.ones(7)
                each.model.late.weight.grad = torch.ones(8, 8)
            each.optimizer.step()
            each.optimizer.zero_grad()
        assert equal(alone, run)
    streamed.close()


def test_a_full_tier_keeps_the_rest_here(tmp_path: Path) -> None:
    alone, run = Run(OPTIMIZERS["adamw loop"]), Run(OPTIMIZERS["adamw loop"])
    tier = make_tier("disk", tmp_path, 20_480)
    streamed = StreamedOptimizerState(run.optimizer, tier, chunk_bytes=CHUNK)
    for _ in range(4):
        alone.step()
        run.step()
    assert equal(alone, run)
    assert 0 < tier.used <= 20_480
    assert streamed.resident > 0
    streamed.close()
    tier.close()


def test_a_disk_that_fails_to_write_keeps_the_state_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone, run = Run(OPTIMIZERS["adamw loop"]), Run(OPTIMIZERS["adamw loop"])
    tier = make_tier("disk", tmp_path)
    streamed = StreamedOptimizerState(run.optimizer, tier, chunk_bytes=CHUNK)
    alone.step()
    run.step()

    def refuse(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(backing.os, "pwrite", refuse)
        alone.step()
        run.step()
    assert streamed.resident > 0
    for _ in range(3):
        alone.step()
        run.step()
    assert equal(alone, run)
    assert streamed.resident == 0
    streamed.close()
    tier.close()


def test_a_disk_that_fails_to_read_is_an_error_and_the_state_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone, run = Run(OPTIMIZERS["adamw loop"]), Run(OPTIMIZERS["adamw loop"])
    tier = make_tier("disk", tmp_path)
    streamed = StreamedOptimizerState(run.optimizer, tier, chunk_bytes=10**6)
    alone.step()
    run.step()
    run.backward()

    def refuse(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(backing.os, "preadv", refuse)
        with pytest.raises(OSError, match="Input/output"):
            run.optimizer.step()
    assert streamed.resident == 0
    run.optimizer.step()
    run.optimizer.zero_grad()
    alone.step()
    assert equal(alone, run)
    streamed.close()
    tier.close()


class Together(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        super().step()


class Alone(Together):
    updates_each_parameter_alone = True


class Counting(torch.optim.Optimizer):
    """Counts its steps in the group, and can make an option of the parameters it sees."""

    updates_each_parameter_alone = True

    def __init__(self, params: Any, global_option: bool) -> None:
        super().__init__(params, {"count": 0, "global_option": global_option, "seen": None})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] += 1
            if group["global_option"]:
                group["seen"] = sum(p.numel() for p in group["params"])
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state.setdefault("mean", torch.zeros_like(p)).add_(p.grad)
                    p.sub_(state["mean"], alpha=0.01 * group["count"])


def test_what_cannot_be_chunked_is_refused(tier: Tier) -> None:
    model = Model()
    for optimizer in (torch.optim.LBFGS(model.parameters()), Together(model.parameters(), lr=0.1)):
        with pytest.raises(InputError, match="updates every parameter by itself"):
            StreamedOptimizerState(optimizer, tier)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    plain.step = lambda: None  # type: ignore[method-assign, assignment]
    with pytest.raises(InputError, match="step replaced"):
        StreamedOptimizerState(plain, tier)
    with pytest.raises(InputError, match="chunk_bytes"):
        StreamedOptimizerState(Alone(model.parameters(), lr=0.1), tier, chunk_bytes=0)
    run = Run(OPTIMIZERS["sgd"])
    streamed = StreamedOptimizerState(run.optimizer, tier)
    with pytest.raises(InputError, match="closure"):
        run.optimizer.step(lambda: 0.0)
    streamed.close()


def test_options_that_the_optimizer_changes(tier: Tier) -> None:
    """A counter in the group counts steps and not chunks; an option that depends on which parameters it sees is refused."""
    alone, run = Run(lambda g: Counting(g, False)), Run(lambda g: Counting(g, False))
    streamed = StreamedOptimizerState(run.optimizer, tier, chunk_bytes=3_000)
    for _ in range(3):
        alone.step()
        run.step()
    assert equal(alone, run)
    assert [g["count"] for g in run.optimizer.param_groups] == [3, 3]
    streamed.close()
    other = Run(lambda g: Counting(g, True))
    streamed = StreamedOptimizerState(other.optimizer, tier, chunk_bytes=3_000)
    with pytest.raises(LanewayError, match="seen"):
        other.step()
    streamed.close()
