"""Moments of 8 and 4 bits: how far from AdamW in float64, how many bytes, exact going on, and what is refused."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import make_tier
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from laneway.core import InputError, LanewayError
from laneway.memory.lowbit_codes import CELLS, pack, table, unpack
from laneway.memory.lowbit_moments import BLOCKS, Format
from laneway.memory.optimizer_lowbit import LEAST, LowBitOptimizerState
from laneway.memory.optimizer_state import StreamedOptimizerState

CPU = torch.device("cpu")
KINDS = [(8, True), (8, False), (4, True), (4, False)]
SEEDS = st.integers(0, 10**6)


# Codes


@pytest.mark.parametrize(("bits", "signed"), KINDS)
def test_a_code_is_the_nearest_values(bits: int, signed: bool) -> None:
    used = table(bits, signed, CPU)
    middles = used._above[:-1].contiguous()
    edges = torch.cat([middles, used.values, torch.nextafter(middles, torch.tensor(-2.0))])
    spread = torch.rand(20_000) * 10.0 ** -(8 * torch.rand(20_000))
    numbers = torch.cat([edges, spread, -spread]).clamp(-1.0 if signed else 0.0, 1.0)
    assert torch.equal(used.codes(numbers).int(), torch.bucketize(numbers, middles, right=True, out_int32=True))
    assert len(used.values) == 2**bits
    assert torch.equal(used.codes(used.values).int(), torch.arange(2**bits, dtype=torch.int32))
    bits_of = middles.view(torch.int32) >> 16
    assert len(bits_of.unique()) == len(middles) < CELLS  # one a cell: what the coarse look-up relies on


def test_a_second_moment_above_zero_stays_above_zero() -> None:
    for bits in (8, 4):
        numbers = torch.tensor([1.0, 1e-9, 1e-20, 1e-38])
        assert bool((table(bits, False, CPU).numbers(table(bits, False, CPU).codes(numbers)) > 0).all())
    assert table(8, False, CPU).numbers(table(8, False, CPU).codes(torch.zeros(3))).tolist() == [0.0, 0.0, 0.0]


def test_packing() -> None:
    codes = torch.randint(0, 16, (64,), dtype=torch.uint8)
    assert torch.equal(unpack(pack(codes)), codes)


# Moments


def coded(form: Format, moment: Tensor) -> Tensor:
    codes, scales = form.empty(CPU)
    form.encode(moment, codes, scales)
    out = torch.empty_like(moment)
    form.decode(codes, scales, out)
    return out


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(KINDS), st.lists(st.integers(1, 30), min_size=1, max_size=3), SEEDS)
def test_every_element_is_within_half_a_gap_of_its_scale(kind: tuple[int, bool], shape: list[int], seed: int) -> None:
    bits, signed = kind
    generator = torch.Generator().manual_seed(seed)
    moment = torch.randn(shape, generator=generator) * 10.0 ** -(6 * torch.rand(shape, generator=generator))
    moment = moment if signed else moment.square()
    form = Format(bits, signed, moment.shape)
    scale = torch.full_like(moment, float("inf"))
    if form.by_axes:
        for axis in range(moment.dim()):
            others = [other for other in range(moment.dim()) if other != axis]
            scale = torch.minimum(scale, moment.amax(others, keepdim=True))
    else:
        flat, block = moment.flatten(), BLOCKS[bits]
        for start in range(0, flat.numel(), block):
            scale.view(-1)[start : start + block] = flat[start : start + block].abs().max()
    values = table(bits, signed, CPU).values
    gaps = values.diff().max() / 2
    edge = max(float(gaps), float(1 + values[0]) if signed else float(values[0]))  # beyond the lowest value
    error = (coded(form, moment) - moment).abs()
    assert bool((error <= scale * edge * 1.0001).all())
    assert signed or bool((coded(form, moment) > 0).eq(moment > 0).all())


@pytest.mark.parametrize(("bits", "signed"), KINDS)
def test_large_moments_go_in_tiles_and_strides_do_not_matter(bits: int, signed: bool) -> None:
    moment = torch.randn(3, 211, 601)
    moment = moment if signed else moment.square()
    form = Format(bits, signed, moment.shape)
    whole = coded(form, moment)
    strided = moment.transpose(0, 2).contiguous().transpose(0, 2)
    assert torch.equal(coded(form, strided), whole)
    if not form.by_axes:
        part = moment.flatten()[: 40 * 256]
        assert torch.equal(coded(Format(bits, signed, part.shape), part), whole.flatten()[: 40 * 256])
    assert float((whole - moment).norm() / moment.norm()) < {8: 0.02, 4: 0.25}[bits]


@pytest.mark.parametrize(("bits", "signed"), KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_does_not_pass_for_finite(bits: int, signed: bool, bad: float) -> None:
    moment = torch.rand(64, 256)
    moment[3, 5] = bad
    found = coded(Format(bits, signed, moment.shape), moment)
    assert bool(found[3, 5].isnan())
    assert bool(found[10:, 6:].isfinite().all())


# The optimizer


class Problem:
    """Regression by a two-layer network; the batch of a step depends on its number only."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer], dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(32, 160), nn.Tanh(), nn.Linear(160, 48)).to(dtype)
        for parameter in self.model.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator).to(dtype) / parameter.shape[-1] ** 0.5
        self.target = torch.randn(32, 48, generator=generator).to(dtype)
        self.start = self.flat()
        self.optimizer, self.number, self.dtype, self.seed = make(self.model.parameters()), 0, dtype, seed

    def backward(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1000 + self.number)
        self.number += 1
        x = torch.randn(24, 32, generator=generator).to(self.dtype)
        loss = (self.model(x) - torch.sin(x @ self.target)).square().mean()
        loss.backward()
        return loss.detach()

    def step(self) -> float:
        loss = self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss)

    def flat(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()]).clone()


def adamw(parameters: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.01)


@pytest.mark.parametrize(("bits", "bound"), [(32, 1e-3), (8, 0.04), (4, 0.35)])
def test_the_path_of_the_weights_stays_near_that_of_float64(bits: int, bound: float) -> None:
    """Distance of the weights from AdamW in float64 after 60 steps, over how far that one has come."""
    seed = int(torch.randint(0, 1000, ()))
    exact, run = Problem(adamw, torch.float64, seed), Problem(adamw, seed=seed)
    if bits != 32:
        LowBitOptimizerState(run.optimizer, bits)
    first = [exact.step() for _ in range(60)]
    last = [run.step() for _ in range(60)]
    way = (exact.flat() - exact.start).norm()
    assert float((run.flat().double() - exact.flat()).norm() / way) < bound
    assert sum(last[-10:]) < sum(first[-10:]) * 1.01
    assert sum(first[-10:]) < 0.8 * sum(first[:10])


@pytest.mark.parametrize(("bits", "share"), [(8, 0.27), (4, 0.15)])
def test_bytes(bits: int, share: float, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(500, 96), nn.Linear(96, 384), nn.Linear(384, 96), nn.LayerNorm(96))
    full = sum(2 * 4 * p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    tier = make_tier("disk", tmp_path)
    for place in (None, tier):
        low = LowBitOptimizerState(optimizer, bits, tier=place, chunk_bytes=100_000)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        assert 0.9 * bits / 32 * full < low.nbytes < share * full
        assert low.nbytes == sum(v.nbytes for e in optimizer.state_dict()["state"].values() for v in e.values() if v.dim())
        assert low.resident == (low.nbytes if place is None else 0)
        low.close()
        assert all(set(e) == {"step", "exp_avg", "exp_avg_sq"} for e in optimizer.state_dict()["state"].values())
    tier.close()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    "make",
    [
        adamw,
        lambda g: torch.optim.AdamW(g, lr=1e-3, fused=True, amsgrad=True),
        lambda g: torch.optim.Adam(g, lr=1e-3, foreach=True),
        lambda g: torch.optim.SGD(g, lr=1e-2, momentum=0.9),
        lambda g: torch.optim.SGD(g, lr=1e-2),
    ],
)
def test_in_a_tier_and_in_other_chunks_it_is_the_same_bit_for_bit(bits: int, make: Any, tmp_path: Path) -> None:
    here, there = Problem(make), Problem(make)
    tier = make_tier("disk", tmp_path)
    LowBitOptimizerState(here.optimizer, bits)
    streamed = LowBitOptimizerState(there.optimizer, bits, tier=tier, chunk_bytes=30_000)
    for _ in range(6):
        here.step()
        there.step()
        assert torch.equal(here.flat(), there.flat())
        assert streamed.resident == 0
    ours, others = here.optimizer.state_dict()["state"], there.optimizer.state_dict()["state"]
    assert [list(e) for e in ours.values()] == [list(e) for e in others.values()]
    assert all(torch.equal(v, others[k][n]) for k, e in ours.items() for n, v in e.items() if isinstance(v, Tensor))
    streamed.close()
    assert tier.used == 0
    tier.close()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("place", [None, "disk"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_going_on_from_a_state_dict_is_exact(bits: int, place: str | None, dtype: torch.dtype, tmp_path: Path) -> None:
    one = Problem(adamw, dtype)
    LowBitOptimizerState(one.optimizer, bits)
    for _ in range(4):
        one.step()
    file = io.BytesIO()
    torch.save({"model": one.model.state_dict(), "optimizer": one.optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = Problem(adamw, dtype, seed=9)
    tier = None if place is None else make_tier(place, tmp_path)
    low = LowBitOptimizerState(other.optimizer, bits, tier=tier, chunk_bytes=30_000)
    other.step()
    other.model.load_state_dict(saved["model"])
    other.optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
    other.number, other.seed, other.target = one.number, one.seed, one.target
    for _ in range(4):
        one.step()
        other.step()
        assert torch.equal(one.flat(), other.flat())
    low.close()
    if tier is not None:
        tier.close()


def test_whole_moments_are_taken_and_rounded_and_given_back() -> None:
    plain, run = Problem(adamw), Problem(adamw)
    plain.step()
    whole = plain.optimizer.state_dict()
    low = LowBitOptimizerState(run.optimizer, 8)
    run.optimizer.load_state_dict(copy.deepcopy(whole))
    assert low.nbytes < 0.3 * sum(v.nbytes for e in whole["state"].values() for v in e.values())
    low.close()
    for name in ("exp_avg", "exp_avg_sq"):
        ours, its = run.optimizer.state_dict()["state"][0][name], whole["state"][0][name]
        assert 0 < float((ours - its).norm() / its.norm()) < 0.02
    later = LowBitOptimizerState(plain.optimizer, 4)  # state that is there already
    assert low.nbytes > 4 * later.nbytes


def test_state_dicts_of_other_bits_are_refused_and_change_nothing(tmp_path: Path) -> None:
    eight, four, plain = Problem(adamw), Problem(adamw), Problem(adamw)
    LowBitOptimizerState(eight.optimizer, 8)
    LowBitOptimizerState(four.optimizer, 4)
    tier = make_tier("disk", tmp_path)
    streamed = StreamedOptimizerState(plain.optimizer, tier)
    for problem in (eight, four, plain):
        problem.step()
    before = copy.deepcopy(four.optimizer.state_dict()["state"])
    with pytest.raises(LanewayError, match="not of 4 bits"):
        four.optimizer.load_state_dict(eight.optimizer.state_dict())
    with pytest.raises(LanewayError, match="LowBitOptimizerState"):
        plain.optimizer.load_state_dict(eight.optimizer.state_dict())
    after = four.optimizer.state_dict()["state"]
    assert all(torch.equal(v, after[k][n]) for k, e in before.items() for n, v in e.items())
    streamed.close()
    tier.close()


class Failing(torch.optim.AdamW):
    """Its step fails in the middle, when told so."""

    updates_each_parameter_alone = True
    fails = False

    def step(self, closure: Any = None) -> None:
        super().step()
        if self.fails:
            raise RuntimeError("in the middle")


def test_a_step_that_fails_leaves_the_codes_as_they_were() -> None:
    run = Problem(lambda g: Failing(g, lr=1e-2))
    LowBitOptimizerState(run.optimizer, 8, chunk_bytes=1)
    run.step()
    state = run.optimizer.state_dict()["state"]
    before = copy.deepcopy(state)
    run.optimizer.fails = True  # type: ignore[attr-defined]
    run.backward()
    with pytest.raises(RuntimeError, match="in the middle"):
        run.optimizer.step()
    after = run.optimizer.state_dict()["state"]
    assert list(after[0]) == list(before[0])
    assert all(torch.equal(after[0][name], before[0][name]) for name in before[0] if name != "step")
    run.optimizer.fails = False  # type: ignore[attr-defined]
    run.optimizer.step()


def test_learning_rate_schedules_and_scalers_work_on_it() -> None:
    run = Problem(adamw)
    LowBitOptimizerState(run.optimizer, 8)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(run.optimizer, 10)
    for _ in range(3):
        run.step()
        schedule.step()
    assert run.optimizer.param_groups[0]["lr"] < 3e-3
    assert float(run.optimizer.state[next(run.model.parameters())]["step"]) == 3


def test_what_is_refused() -> None:
    model = nn.Linear(64, 64)
    for optimizer in (torch.optim.RMSprop(model.parameters()), torch.optim.Adafactor(model.parameters())):
        with pytest.raises(InputError, match="AdamW, Adam or SGD"):
            LowBitOptimizerState(optimizer, 8)
    for bits in (2, 16, True, "8"):
        with pytest.raises(InputError, match="bits"):
            LowBitOptimizerState(torch.optim.AdamW(model.parameters()), bits)  # type: ignore[arg-type]


def test_sharded_parameters_are_refused_by_name(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        weight = nn.Parameter(distribute_tensor(torch.randn(64, 64), init_device_mesh("cpu", (1,))))
        with pytest.raises(InputError, match="DTensor"):
            LowBitOptimizerState(torch.optim.AdamW([weight]), 8)
    finally:
        dist.destroy_process_group()


# Against torchao


@pytest.mark.peers
@pytest.mark.parametrize("bits", [8, 4])
def test_the_codes_are_those_of_torchao(bits: int) -> None:
    """For vectors: the same tables and scales, so the same numbers (halfway between two is a matter of rounding)."""
    subclass = pytest.importorskip(f"torchao.optim.subclass_{bits}bit")
    theirs = getattr(subclass, f"OptimState{bits}bit")
    for signed in (True, False):
        moment = torch.randn(LEAST * 4)
        moment = moment if signed else moment.square()
        form = Format(bits, signed, moment.shape)
        other = theirs.zeros(moment.shape, signed, BLOCKS[bits])
        other.copy_(moment)
        differ = (other.dequantize() - coded(form, moment)).abs() > 1e-6 * moment.abs().max()
        assert float(differ.float().mean()) < 1e-3
