"""Purification: a healthy run keeps every bit; a path gone astray is found, moved back and told of, and no other is touched."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from laneway.connections.paths import Path, Piece
from laneway.connections.purify import GradientPurifier
from laneway.core import Extension, InputError, LanewayError, SharesStatistics

SHAPES = {"in": (12, 40), "out": (20, 24)}


class Net:
    """``layers`` times two matrices, with random gradients whose size varies by path, by step and by element."""

    def __init__(self, layers: int = 6, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        self.draw = torch.Generator().manual_seed(seed)
        self.dtype = dtype
        self.parameters = {
            f"blocks.{i}.{kind}": nn.Parameter(torch.zeros(shape, dtype=dtype))
            for i in range(layers)
            for kind, shape in SHAPES.items()
        }
        self.size = {name: math.exp(torch.randn((), generator=self.draw).item() - 5) for name in self.parameters}
        self.paths = [
            Path(name, f"blocks.*.{name.rpartition('.')[2]}", (Piece(p, 0, p.shape[0]),)) for name, p in self.parameters.items()
        ]

    def backward(self, common: float = 1.0) -> dict[str, torch.Tensor]:
        """New gradients; returns them."""
        for name, p in self.parameters.items():
            noise = torch.randn(p.shape, generator=self.draw, dtype=torch.float64)
            wave = math.exp(0.4 * torch.randn((), generator=self.draw).item())
            p.grad = (noise * self.size[name] * wave * common).to(self.dtype)
        return self.gradients()

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: p.grad.clone() for name, p in self.parameters.items()}


def step(net: Net, purifier: GradientPurifier, number: int, fault: dict[str, float] | None = None, common: float = 1.0) -> tuple:
    """→ gradients before the purifier, after it, and its metrics."""
    purifier.on_step_begin(number)
    net.backward(common)
    for name, factor in (fault or {}).items():
        net.parameters[name].grad.mul_(factor)
    before = net.gradients()
    purifier.on_backward_end(number)
    row: dict[str, Any] = {}
    purifier.on_step_end(number, row)
    return before, net.gradients(), row


def settle(net: Net, purifier: GradientPurifier, steps: int = 24) -> None:
    for number in range(1, steps + 1):
        before, after, row = step(net, purifier, number)
        assert row["purified_paths"] == 0
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_it_is_an_extension_that_may_share():
    purifier = GradientPurifier(Net().paths)
    assert isinstance(purifier, Extension)
    assert isinstance(purifier, SharesStatistics)


@pytest.mark.parametrize("screen", ["now", "late", "off"])
@given(seed=st.integers(0, 10**6))
@settings(max_examples=3, deadline=None)
def test_a_healthy_run_keeps_every_bit(screen, seed):
    """Also where all gradients leap together, as with a hard batch or another loss scale."""
    net = Net(seed=seed)
    purifier = GradientPurifier(net.paths, 2, screen=screen)
    settle(net, purifier)
    for number in range(25, 40):
        before, after, row = step(net, purifier, number, common=1e4 if number > 30 else 300.0)
        assert row["purified_paths"] == 0
        assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("screen", "repaired"),
    [("now", [1, 1, 1, 1, 1, 1, 1, 1]), ("late", [0, 1, 1, 1, 1, 1, 1, 1]), ("off", [0, 0, 0, 1, 0, 0, 0, 1])],
)
def test_a_lasting_fault_is_repaired_where_it_is_looked_at(screen, repaired):
    net = Net(seed=3)
    purifier = GradientPurifier(net.paths, 4, screen=screen)
    settle(net, purifier, 32)
    usual = float(np.nanquantile(np.exp(purifier.history.norms[4]), 0.9))
    found = []
    for number in range(33, 41):
        before, after, row = step(net, purifier, number, {"blocks.2.in": 1e4})
        found.append(row["purified_paths"])
        for name in before:
            if name != "blocks.2.in" or not row["purified_paths"]:
                assert torch.equal(before[name], after[name])
        if row["purified_paths"]:
            bad, good = before["blocks.2.in"], after["blocks.2.in"]
            assert good.norm() <= usual * 1.001
            assert good.norm() > usual / 10
            assert (good.abs() <= bad.abs()).all()
            assert torch.equal(good.sign(), bad.sign())
    assert found == repaired
    assert purifier.checks == {"now": 8 + 8, "late": 8 + 7, "off": 8 + 2}[screen] + 0


def test_a_huge_value_costs_its_neighbours_nothing():
    """What a norm guard can't: the path's other values keep every bit."""
    net = Net(seed=1)
    purifier = GradientPurifier(net.paths, 4)
    settle(net, purifier)
    for value in (1e4, 1e30):  # the square of the second overflows
        purifier.on_step_begin(25)
        net.backward()
        net.parameters["blocks.1.out"].grad[3, 5] = value
        before = net.gradients()
        purifier.on_backward_end(25)
        after = net.gradients()
        same = before["blocks.1.out"] == after["blocks.1.out"]
        assert same.sum() >= same.numel() - 3  # what lies between the highest quantiles may move a little
        assert 0 < after["blocks.1.out"][3, 5] < 20 * before["blocks.1.out"].abs().median()


def test_a_part_of_a_path_is_moved_and_the_rest_hardly():
    net = Net(seed=5)
    purifier = GradientPurifier(net.paths, 4)
    settle(net, purifier)
    usual = float(np.nanquantile(np.exp(purifier.history.norms[3]), 0.9))
    purifier.on_step_begin(25)
    healthy = net.backward()["blocks.1.out"]
    net.parameters["blocks.1.out"].grad[:4] *= 1e4  # a fifth of it
    purifier.on_backward_end(25)
    after = net.parameters["blocks.1.out"].grad
    assert purifier.flagged == [3]
    assert after.norm() <= usual * 1.001
    assert after[4:].norm() > 0.3 * healthy[4:].norm()


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_told_of_left_and_no_ones_peer(poison):
    told: list[dict[str, Any]] = []
    net, clean = Net(seed=2), Net(seed=2)
    purifier = GradientPurifier(net.paths, 4, tell=lambda kind, **fields: told.append(fields))
    reference = GradientPurifier(clean.paths, 4)
    for number in range(1, 29):
        purifier.on_step_begin(number)
        net.backward()
        if number in (8, 13, 25):
            net.parameters["blocks.1.in"].grad[2, 2] = poison
        before = net.gradients()
        purifier.on_backward_end(number)
        purifier.on_step_end(number, {})
        assert all(
            torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(before.values(), net.gradients().values(), strict=True)
        )
        step(clean, reference, number)
    assert [(f["path"], f["score"], f["correction"], f["in_a_row"]) for f in told] == [("blocks.1.in", None, None, 1)] * 3
    others = [i for i in range(12) if i != 2]
    for name in ("mean", "checks", "norms", "steps", "peaks"):
        value = purifier.history.state_dict()[name]
        assert torch.equal(value[others].nan_to_num(7), reference.history.state_dict()[name][others].nan_to_num(7))
    assert not np.isnan(purifier.history.mean).any()


def test_a_fault_from_the_first_step_is_found_by_its_peers():
    net = Net(layers=8, seed=4)
    purifier = GradientPurifier(net.paths, 2)
    found = [step(net, purifier, number, {"blocks.3.out": 1e5})[2]["purified_paths"] for number in range(1, 30)]
    assert found[1::2] == [1] * 14
    assert sum(found[8:]) == 21  # with a past, from step to step


@pytest.mark.parametrize("leaps", [False, True])
def test_a_path_that_parts_from_its_peers_in_the_first_steps_is_left_alone(leaps):
    """All others fall by orders of magnitude, as where one layer learns first; a leap of its own is found all the same."""
    net = Net(layers=8, seed=12)
    purifier = GradientPurifier(net.paths, 6)
    found = []
    for number in range(1, 18):
        fall = math.exp(-2.0 * max(number - 6, 0))
        fault = {name: fall for name in net.parameters if name != "blocks.3.out"}
        found.append(step(net, purifier, number, fault | ({"blocks.3.out": 1e4} if leaps and number > 10 else {}))[2])
    assert not purifier.history.mature.any()
    assert [row["purified_paths"] for row in found] == [0] * 10 + [int(leaps)] * 7


def test_two_layers_make_no_peers_but_have_a_past():
    net = Net(layers=2, seed=4)
    purifier = GradientPurifier(net.paths, 4)
    settle(net, purifier)
    before, after, row = step(net, purifier, 25, {"blocks.1.out": 1e4})
    assert row["purified_paths"] == 1
    assert after["blocks.1.out"].norm() < before["blocks.1.out"].norm() / 1e3


@pytest.mark.parametrize(("release", "last"), [(0.0, 1), (2.0, 0)])
def test_a_leap_that_lasts_is_taken_for_usual_at_the_pace_of_release(release, last):
    net = Net(seed=6)
    purifier = GradientPurifier(net.paths, 2, release=release)
    settle(net, purifier)
    found = [step(net, purifier, number, {"blocks.2.in": 300.0})[2]["purified_paths"] for number in range(25, 70)]
    assert found[0] == 1
    assert found[-1] == last


def test_a_path_without_a_gradient_is_skipped():
    net = Net(seed=7)
    purifier = GradientPurifier(net.paths, 2)
    for number in range(1, 20):
        purifier.on_step_begin(number)
        net.backward()
        if number % 3 == 0:
            net.parameters["blocks.0.in"].grad = None
            net.parameters["blocks.1.in"].grad.zero_()
        purifier.on_backward_end(number)
        assert purifier.flagged == []
    assert purifier.history.steps.tolist()[:3] == [13, 19, 13]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_gradients_of_other_dtypes(dtype):
    net = Net(seed=8, dtype=dtype)
    purifier = GradientPurifier(net.paths, 4)
    settle(net, purifier)
    before, after, row = step(net, purifier, 25, {"blocks.1.out": 1e4})
    assert row["purified_paths"] == 1
    assert after["blocks.1.out"].dtype == dtype
    assert (after["blocks.1.out"].abs() <= before["blocks.1.out"].abs()).all()
    assert after["blocks.1.out"].norm() < before["blocks.1.out"].norm() / 1e3


def test_a_narrow_gradient_among_wide_peers_whose_values_it_cannot_hold():
    net = Net(layers=5, seed=13)
    narrow = nn.Parameter(torch.zeros(SHAPES["in"], dtype=torch.float16))
    paths = [Path("blocks.9.in", "blocks.*.in", (Piece(narrow, 0, SHAPES["in"][0]),)), *net.paths]
    purifier = GradientPurifier(paths, 1)
    purifier.on_step_begin(1)
    net.backward()
    for i in range(5):
        net.parameters[f"blocks.{i}.in"].grad[0, 0] = 1e6
    narrow.grad = torch.randn(SHAPES["in"]).mul_(1e4).half()
    before = narrow.grad.clone()
    purifier.on_backward_end(1)
    assert 0 in purifier.flagged
    assert narrow.grad.abs().median() < before.abs().median() / 1000
    assert torch.equal(narrow.grad.sign(), before.sign())


def test_an_expert_without_tokens_is_no_peer_and_no_outlier_when_it_comes_back():
    net = Net(layers=6, seed=14)
    purifier = GradientPurifier(net.paths, 2)
    for number in range(1, 30):
        purifier.on_step_begin(number)
        before = net.backward()
        for i, name in enumerate(net.parameters):
            if (number + i) % 5:  # tokens come every fifth step; between them no gradient, or one of zeros
                net.parameters[name].grad = None if i % 2 else torch.zeros_like(before[name])
        before = {name: p.grad.clone() for name, p in net.parameters.items() if p.grad is not None}
        purifier.on_backward_end(number)
        assert purifier.flagged == []
        assert all(torch.equal(net.parameters[name].grad, kept) for name, kept in before.items())


def test_a_step_in_which_every_path_is_poisoned_is_left_and_forgotten():
    net, clean = Net(seed=15), Net(seed=15)
    purifier, reference = GradientPurifier(net.paths, 2), GradientPurifier(clean.paths, 2)
    for number in range(1, 12):
        purifier.on_step_begin(number)
        net.backward()
        if number == 6:
            for p in net.parameters.values():
                p.grad.fill_(math.nan)
        purifier.on_backward_end(number)
        step(clean, reference, number)
        assert purifier.flagged == []
    assert purifier.history.steps.tolist() == [10] * 12
    assert np.isfinite(purifier.history.mean).all()


@pytest.mark.parametrize("screen", ["now", "late", "off"])
def test_a_resume_is_exact(screen):
    fault = {"blocks.2.in": 1e4}
    net = Net(seed=9)
    whole = GradientPurifier(net.paths, 3, screen=screen)
    for number in range(1, 26):
        step(net, whole, number, fault if number == 25 else None)
    state, draw = copy.deepcopy(whole.state_dict()), net.draw.get_state()
    expected = [step(net, whole, number, fault) for number in range(26, 34)]
    net.draw.set_state(draw)
    resumed = GradientPurifier(net.paths, 3, screen=screen)
    resumed.load_state_dict(state)
    for number, (_, wanted, row) in zip(range(26, 34), expected, strict=True):
        _, after, found = step(net, resumed, number, fault)
        assert found == row
        assert all(torch.equal(after[name], wanted[name]) for name in after)
    assert whole.in_a_row == resumed.in_a_row
    with pytest.raises(InputError, match="paths"):
        GradientPurifier(Net(layers=3).paths).load_state_dict(state)


def test_a_long_episode_is_told_of_at_its_1st_10th_and_100th_check():
    told: list[dict[str, Any]] = []
    net = Net(seed=10, layers=3)
    purifier = GradientPurifier(net.paths, 4, release=0.0, tell=lambda kind, **fields: told.append({"kind": kind, **fields}))
    settle(net, purifier)
    for number in range(25, 126):
        step(net, purifier, number, {"blocks.1.in": 1e5})
    assert [fields["in_a_row"] for fields in told] == [1, 10, 100]
    assert {fields["kind"] for fields in told} == {"purify"}
    assert all(fields["score"] >= 1 and 0 < fields["correction"] < 1e-3 for fields in told)


class Gathered:
    """Statistics of three ranks, of which the last one decides as it is told to."""

    def __init__(self) -> None:
        self.other: float | None = None
        self.values: dict[str, float] = {}

    def add(self, name: str, size: int = 1, op: str = "sum") -> None:
        assert (size, op) == (1, "gather")

    def put(self, name: str, values: float) -> None:
        self.values[name] = values

    def get(self, name: str) -> torch.Tensor | None:
        if name not in self.values:
            return None
        mine = self.values[name]
        return torch.tensor([[mine], [mine], [mine if self.other is None else self.other]])


def test_ranks_that_decide_differently_are_found_out():
    net, ranks = Net(seed=11), Gathered()
    purifier = GradientPurifier(net.paths, 2, verify=True)
    purifier.share(ranks)
    settle(net, purifier)
    ranks.other = ranks.values["purify/decision"] + 1
    with pytest.raises(LanewayError, match="in step 24 rank 2 decided otherwise"):
        purifier.on_step_begin(25)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("every", 0),
        ("sample", 8),
        ("screen", "later"),
        ("strength", 0.0),
        ("strength", 1.5),
        ("floor", 0.0),
        ("zeta", -1.0),
        ("release", math.nan),
        ("every", True),
        ("every", "6"),
        ("strength", "all"),
        ("floor", True),
        ("floor", None),
        ("zeta", math.inf),
    ],
)
def test_bad_values_are_named(field, value):
    with pytest.raises(InputError, match=f"{field}: got"):
        GradientPurifier(Net().paths, **{field: value})
    with pytest.raises(InputError, match=r"paths: got \[\]"):
        GradientPurifier([])
