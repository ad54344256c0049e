"""A path's norm against its own average: what leaps is scaled to the average, everything else keeps every bit."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from laneway.connections.guard import PathNormGuard
from laneway.connections.paths import Path, Piece, paths_of
from laneway.core import Extension, InputError


def paths(count: int = 3, rows: int = 4, width: int = 5) -> list[Path]:
    parameters = [nn.Parameter(torch.randn(rows, width)) for _ in range(count)]
    return [Path(f"blocks.{i}.f", "blocks.*.f", (Piece(p, 0, rows),)) for i, p in enumerate(parameters)]


def fill(found: list[Path], scale: dict[int, float] | None = None, seed: int | None = None) -> list[torch.Tensor]:
    """Fresh gradients; returns copies of them."""
    generator = torch.Generator().manual_seed(seed) if seed is not None else None
    for i, path in enumerate(found):
        for piece in path.pieces:
            piece.parameter.grad = torch.randn(piece.parameter.shape, generator=generator) * (scale or {}).get(i, 1.0)
    return [path.pieces[0].parameter.grad.clone() for path in found]


def run(guard: PathNormGuard, found: list[Path], step: int, scale: dict[int, float] | None = None) -> tuple[list, list]:
    before = fill(found, scale, seed=step)
    guard.on_step_begin(step)
    guard.on_backward_end(step)
    return before, [path.pieces[0].parameter.grad.clone() for path in found]


def test_it_is_an_extension():
    assert isinstance(PathNormGuard(paths()), Extension)


@settings(max_examples=15, deadline=None)
@given(factor=st.floats(1.5, 100), leap=st.floats(200, 1e6))
def test_a_leap_is_scaled_to_the_average_and_nothing_else_is_touched(factor, leap):
    found = paths()
    guard = PathNormGuard(found, factor, warmup=3)
    norms = []
    for step in range(6):
        before, after = run(guard, found, step)
        norms.append(before[1].norm())
        if guard.purified == 0:
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    mean = float(guard.mean[1])
    before, after = run(guard, found, 6, {1: leap})
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[2], after[2])
    torch.testing.assert_close(after[1], (before[1] * mean / before[1].double().norm()).float())
    weight = max(1 / 7, 1 - guard.decay)
    assert guard.mean[1] == pytest.approx(mean * (1 + weight * (factor - 1)))


def test_the_average_is_the_mean_and_then_an_exponential_one():
    found = paths(1)
    guard = PathNormGuard(found, 1e6, decay=0.75)
    expected = 0.0
    for step in range(12):
        before, _ = run(guard, found, step)
        norm = before[0].double().norm().item()
        expected += max(1 / (step + 1), 0.25) * (norm - expected)
        assert guard.mean.item() == pytest.approx(expected, rel=1e-5)


def test_nothing_is_changed_before_the_averages_are_known():
    found = paths()
    guard = PathNormGuard(found, warmup=5)
    for step in range(5):
        before, after = run(guard, found, step, {step % 3: 1e5})
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_left_and_moves_no_average(poison):
    found = paths()
    guard = PathNormGuard(found, warmup=1)
    for step in range(3):
        run(guard, found, step)
    mean = guard.mean.copy()
    before = fill(found)
    found[0].pieces[0].parameter.grad[1, 2] = poison
    guard.on_backward_end(3)
    assert guard.mean[0] == mean[0]
    assert torch.equal(found[1].pieces[0].parameter.grad, before[1])
    assert guard.purified == 0


def test_a_lasting_leap_is_let_through_in_the_end():
    found = paths(1)
    guard = PathNormGuard(found, 2.0, warmup=2, decay=0.9)
    for step in range(10):
        run(guard, found, step)
    flagged = []
    for step in range(10, 60):
        run(guard, found, step, {0: 20.0})
        flagged.append(guard.purified)
    assert flagged[0] == 1
    assert flagged[-1] == 0
    assert sum(flagged) == pytest.approx(math.log(20 / 2) / math.log(1.1), abs=8)


def test_resume_is_exact_and_other_paths_are_refused():
    found = paths()
    whole = PathNormGuard(found, 2.0, warmup=2)
    for step in range(4):
        run(whole, found, step)
    state = copy.deepcopy(whole.state_dict())
    resumed = PathNormGuard(found, 2.0, warmup=2)
    resumed.load_state_dict(state)
    for step in range(4, 8):
        assert all(
            torch.equal(a, b)
            for a, b in zip(run(whole, found, step, {2: 9.0})[1], run(resumed, found, step, {2: 9.0})[1], strict=True)
        )
    assert (whole.mean == resumed.mean).all()
    with pytest.raises(InputError, match="paths"):
        PathNormGuard(paths(4)).load_state_dict(state)


def test_what_was_done_is_told_once_a_step():
    found, told = paths(), []
    guard = PathNormGuard(found, warmup=1, tell=lambda kind, **fields: told.append((kind, fields)))
    for step in range(2):
        run(guard, found, step)
    run(guard, found, 2, {1: 1e4})
    row: dict = {}
    guard.on_step_end(2, row)
    guard.on_step_end(3, {})
    assert row["purified_paths"] == 1
    [(kind, fields)] = told
    assert (kind, fields["path"]) == ("purify", "blocks.1.f")
    assert fields["score"] * fields["correction"] == pytest.approx(1)


@pytest.mark.parametrize("poison", [math.nan, -math.inf])
def test_a_poisoned_path_is_told_of_by_its_name_and_the_others_are_guarded(poison):
    found, told = paths(), []
    guard = PathNormGuard(found, warmup=1, tell=lambda kind, **fields: told.append(fields))
    for step in range(3):
        run(guard, found, step)
    fill(found, {1: 1e4}, seed=3)
    found[2].pieces[0].parameter.grad[0, 0] = poison
    guard.on_backward_end(3)
    row: dict = {}
    guard.on_step_end(3, row)
    assert [fields["path"] for fields in told] == ["blocks.1.f", "blocks.2.f"]
    assert told[1] == {"path": "blocks.2.f", "score": None, "correction": None}
    assert row["purified_paths"] == 1
    assert found[1].pieces[0].parameter.grad.norm() < 10


BAD = [
    *(("factor", value) for value in (1.0, math.nan, math.inf, True, "much", None)),
    *(("decay", value) for value in (1.0, -0.1, "0.9", None)),
    *(("warmup", value) for value in (0, 2.5, True)),
]


@pytest.mark.parametrize(("field", "value"), BAD)
def test_bad_values_are_named(field, value):
    with pytest.raises(InputError, match=f"{field}: got"):
        PathNormGuard(paths(), **{field: value})
    with pytest.raises(InputError, match=r"paths: got \[\]"):
        PathNormGuard([])


def test_a_model_without_paths_is_refused():
    with pytest.raises(InputError, match="model"):
        paths_of(nn.Linear(2, 2))
