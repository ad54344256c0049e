"""Sums over paths by compiled kernels and by torch, against float64; and what they keep alive."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from laneway.connections import path_gradients
from laneway.connections.backends import use_backend
from laneway.connections.guard import PathNormGuard
from laneway.connections.path_gradients import PathGradients
from laneway.connections.paths import Path, Piece
from laneway.connections.purify import GradientPurifier
from laneway.connections.transport import BINS, LOWEST

BACKENDS = pytest.mark.parametrize("backend", ["torch", "cpu"])


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    found = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    for parameter in found:
        parameter.grad = (torch.randn(parameter.shape) * 10.0 ** torch.randint(-9, 9, ()).item()).to(dtype)
    return found


def thirds(parameter: nn.Parameter) -> list[Piece]:
    rows = parameter.shape[0] // 3
    return [Piece(parameter, i * rows, (i + 1) * rows) for i in range(3)]


def paths(*given: nn.Parameter) -> list[Path]:
    """Each parameter's rows in three, and one path more of the first parameter's rest and another's."""
    pieces = [thirds(parameter) for parameter in given]
    return [Path(f"{i}", "*", tuple(piece[i] for piece in pieces)) for i in range(3)]


def looked(found: list[Path]) -> PathGradients:
    gradients = PathGradients(found)
    gradients.look()
    return gradients


def whole(path: Path) -> torch.Tensor:
    return torch.cat([p.parameter.grad[p.start : p.stop].flatten() for p in path.pieces if p.parameter.grad is not None])


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16])
def test_sums_are_those_in_float64(backend, dtype):
    given = parameters((3, 1), (9, 7), (6, 33), (3, 40000), (3,), dtype=dtype)
    given[1].grad = None
    found = paths(*given)
    gradients = looked(found)
    wanted = torch.stack([whole(path).double().norm() for path in found])
    with use_backend(backend):
        torch.testing.assert_close(gradients.norms(), wanted, rtol=1e-5, atol=0)
        assert torch.equal(gradients.peaks().double(), torch.stack([whole(path).double().abs().max() for path in found]))
    torch.testing.assert_close(gradients.exact([2, 0]).sqrt(), wanted[[2, 0]], rtol=1e-12, atol=0)


@BACKENDS
@pytest.mark.parametrize("scale", [1e-30, 1e-17, 1e19, 3e37])
def test_no_finite_gradient_overflows(backend, scale):
    given = parameters((6, 33), (9, 5))
    for parameter in given:
        parameter.grad = torch.rand_like(parameter) * scale
    found = paths(*given)
    wanted = torch.stack([whole(path).double().norm() for path in found])
    with use_backend(backend):
        norms = looked(found).norms()
    if scale == 1e-30 and backend == "torch":
        assert not norms.any()  # fp32 squares: said in the docstring
    else:
        torch.testing.assert_close(norms, wanted, rtol=1e-5, atol=0)


@BACKENDS
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_in_its_path(backend, bad):
    given = parameters((6, 700), (9, 5))
    given[0].grad[2, torch.randint(700, ())] = bad
    with use_backend(backend):
        gradients = looked(paths(*given))
        assert gradients.norms().isfinite().tolist() == [True, False, True]
        assert gradients.peaks().isfinite().tolist() == [True, False, True]
        wanted = gradients.counts(1 << 20)
    assert wanted.sum(1).tolist() == [2 * 700 + 15, 2 * 700 + 15 - 1, 2 * 700 + 15]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_counts_are_torchs(dtype):
    given = parameters((9, 50), (6, 333), (3,), dtype=dtype)
    given[0].grad[0, :9] = torch.tensor([0.0, -0.0, 2.0**-140, 2.0**-96, 2.0**0.5, -(2.0**0.5), 1.0, 3e38, 1e-30]).to(dtype)
    for sample in (1 << 20, 64, 7):
        found = {}
        for backend in ("torch", "cpu"):
            with use_backend(backend):
                found[backend] = looked(paths(*given)).counts(sample)
        assert torch.equal(found["torch"], found["cpu"])
        assert found["cpu"].sum() > 0


def test_bins_are_half_octaves():
    exponents = torch.randint(-94, 30, (300,)).double() / 2
    values = (2.0**exponents * (1 + 1e-6)).float()
    parameter = nn.Parameter(torch.zeros(300, 1))
    parameter.grad = values[:, None] * torch.randint(2, (300, 1)).mul(2).sub(1)
    wanted = torch.zeros(BINS).double().index_add_(0, ((exponents - LOWEST) * 2).long(), torch.ones(300).double())
    for backend in ("torch", "cpu"):
        with use_backend(backend):
            assert torch.equal(looked([Path("0", "*", (Piece(parameter, 0, 300),))]).counts(300)[0], wanted)


def test_threads_change_no_bit():
    found = paths(*parameters((3, 70000), (9, 7), (6, 40000)))
    before, sums = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            sums.append(looked(found).squares())
    finally:
        torch.set_num_threads(before)
    assert torch.equal(sums[0], sums[1])
    assert torch.equal(sums[0], sums[2])


def test_compiled_kernels_serve_unless_torch_is_asked_for(monkeypatch):
    calls = []
    compiled = path_gradients.path_sums
    monkeypatch.setattr(path_gradients, "path_sums", lambda *given: calls.append(1) or compiled(*given))
    found = paths(*parameters((6, 33)))
    monkeypatch.delenv("LANEWAY_BACKEND", raising=False)
    gradients = looked(found)
    gradients.norms(), gradients.peaks()
    assert len(calls) == 1  # one pass for both
    monkeypatch.setenv("LANEWAY_BACKEND", "torch")
    looked(found).norms()
    assert len(calls) == 1
    given = parameters((6, 33))
    given[0].grad = torch.randn(33, 6).T
    torch.testing.assert_close(looked(paths(*given)).norms()[0], given[0].grad[:2].double().norm(), rtol=1e-5, atol=0)
    assert len(calls) == 1  # not for gradients with gaps


@pytest.mark.parametrize("make", [PathNormGuard, lambda found: GradientPurifier(found, every=2)], ids=["guard", "purifier"])
def test_gradients_are_not_kept_alive(make):
    given = parameters(*[(6, 33)] * 4)
    control = make([Path(f"{i}", "*", (Piece(parameter, 0, 6),)) for i, parameter in enumerate(given)])
    for step in range(1, 5):
        for parameter in given:
            parameter.grad = torch.randn_like(parameter)
        kept = [weakref.ref(parameter.grad) for parameter in given]
        control.on_step_begin(step)
        control.on_backward_end(step)
        for parameter in given:
            parameter.grad = None
        gc.collect()
        assert not any(ref() is not None for ref in kept)


def test_sums_hang_on_no_default_device():
    gradients = looked(paths(*parameters((9, 7), (6, 33))))
    wanted = gradients.norms(), gradients.counts(64)
    gradients.look()
    with torch.device("meta"):
        found = gradients.norms(), gradients.counts(64)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
