"""The compiled kernels of curvature: against plain PyTorch in float64, against themselves, and where they may not serve."""

from __future__ import annotations

import copy

import pytest
import torch
from clouds import ball, cap, roll
from hypothesis import given, settings
from hypothesis import strategies as st

import laneway as lw
from laneway.connections.backends import compiled_serves
from laneway.connections.curvature import TokenSample, local_curvature
from laneway.connections.kernels.cpu import backend, build, curvature

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler"),
]
SHAPES = ("plane", "sphere", "roll", "noise", "copies", "holes", "outliers")


@pytest.fixture
def calls(monkeypatch):
    """Names of the kernels that were called."""
    assert compiled_serves(torch.device("cpu"))  # loads and checks them, once
    found, call = [], backend.call
    monkeypatch.setattr(backend, "call", lambda name, *arguments, **kinds: found.append(name) or call(name, *arguments, **kinds))
    return found


def surface(kind, tokens, dims):
    """A cloud [S, d] in fp32."""
    sheet = ball(tokens, 2)
    flat = {"plane": sheet, "sphere": cap(sheet, 2.0), "roll": roll(sheet[:, 0], sheet[:, 1], 1.5)}.get(kind)
    if flat is not None:
        return (flat @ torch.randn(flat.shape[1], dims, dtype=torch.float64)).float()
    y = torch.randn(tokens, dims)
    if kind == "copies":
        y[tokens // 2 :] = y[torch.randint(tokens // 2, (tokens - tokens // 2,))]
    if kind == "holes":
        y[torch.rand(tokens) < 0.2, 0] = float("nan")
        y[-1, -1] = float("inf")
    if kind == "outliers":
        y[0] = 1e15
    return y


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**31 - 1),
    kinds=st.lists(st.sampled_from(SHAPES), min_size=1, max_size=4),
    neighbours=st.integers(2, 31),
    more=st.integers(1, 50),
    dims=st.integers(2, 32),
    stride=st.integers(1, 4),
    scale=st.sampled_from([1e-30, 1e-8, 1.0, 1e8, 1e30]),
)
def test_equals_plain_pytorch_in_float64(seed, kinds, neighbours, more, dims, stride, scale):
    """The same tokens, and their mean κ within a ten-thousandth of the most that κ can be.

    Rounding alone moves it by far less; two neighbours at equal distances to rounding, at the edge of a neighbourhood, may swap.
    """
    torch.manual_seed(seed)
    scale = min(scale, 1e8) if "outliers" in kinds else scale
    clouds = torch.stack([surface(kind, neighbours + more, dims) for kind in kinds]) * scale
    total, count = curvature.local_curvature(clouds, neighbours, stride)
    want, tokens = local_curvature(clouds.double(), neighbours, stride)
    assert count.tolist() == tokens.tolist()
    assert ((total.double() - want).abs() <= 1e-4 * count).all(), (total, want)


def test_one_dimension():
    """Tokens on a line, none of which coincide: κ is that of PyTorch."""
    line = torch.linspace(-1, 1, 64)[:, None] + torch.rand(64, 1) * 0.01
    clouds = torch.stack([line[torch.randperm(64)] for _ in range(8)])
    total, count = curvature.local_curvature(clouds, 12, 1)
    want, tokens = local_curvature(clouds.double(), 12)
    assert count.tolist() == tokens.tolist() == [64] * 8
    torch.testing.assert_close(total.double(), want, rtol=1e-3, atol=1e-2)


def test_results_hang_on_nothing_but_the_cloud():
    """Bit for bit, with any number of threads and of other clouds."""
    clouds = torch.randn(70, 40, 7)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        together = curvature.local_curvature(clouds, 9, 2)
    finally:
        torch.set_num_threads(threads)
    alone = [curvature.local_curvature(cloud[None], 9, 2) for cloud in clouds]
    assert torch.equal(together[0], torch.cat([total for total, _ in alone]))
    assert torch.equal(together[1], torch.cat([count for _, count in alone]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "dims"), [(8, 1), (24, 16), (129, 32), (64, 7)])
@pytest.mark.parametrize("tokens", [0, 1, 13, 16, 1000])
def test_a_sample_is_plain_pytorch_s(calls, dtype, width, dims, tokens):
    sample, x = TokenSample(width, 16, dims), torch.randn(tokens, 3, width).to(dtype)
    x[: tokens // 13, 1, 2] = float("nan")
    into = torch.randn(3, 16, dims)
    assert sample(x, into) is into
    assert calls == ["laneway_token_sample"]
    with lw.use_backend("torch"):
        want = sample(x)
    assert len(calls) == 1
    torch.testing.assert_close(into, want, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_streams_that_lie_apart(calls):
    """Strides that the kernel can follow, and those that it can't."""
    sample, wide = TokenSample(12, 16, 5), torch.randn(40, 24, 4)
    apart = {"every other token": wide.reshape(-1, 4, 12)[::2], "one stream, n times": torch.randn(50, 1, 12).expand(50, 4, 12)}
    for name, x in apart.items():
        torch.testing.assert_close(sample(x), sample(x.clone(memory_format=torch.contiguous_format)), msg=name)
    assert len(calls) == 4
    across = wide[:, :12].transpose(1, 2)
    torch.testing.assert_close(sample(across), sample(across.contiguous()))
    assert len(calls) == 5


def test_plain_pytorch_serves_where_it_is_asked_for_or_the_kernels_cannot(calls, monkeypatch):
    sample, x = TokenSample(12, 16, 5), torch.randn(50, 4, 12)
    local_curvature(sample(x), 5)
    assert calls == ["laneway_token_sample", "laneway_curvature"]
    local_curvature(sample(x.half()).double(), 5)
    sample(x.double())
    torch.func.vmap(sample)(x[None])
    monkeypatch.setenv("LANEWAY_BACKEND", "torch")
    local_curvature(sample(x), 5)
    assert len(calls) == 2


@pytest.mark.parametrize("serves", ["auto", "torch"])
def test_places_that_change_are_followed(serves):
    """Row numbers are kept between passes: not over other places, nor in a copy, nor in many batches of different sizes."""
    first, second, x = TokenSample(6, 8, 3, seed=1), TokenSample(6, 8, 3, seed=2), torch.randn(200, 2, 6)
    with lw.use_backend(serves):
        want, other = first(x), second(x)
        assert not torch.equal(want, other)
        for tokens in range(9, 60):
            assert torch.isfinite(first(x[:tokens])).all()
        again = copy.deepcopy(first)
        first.load_state_dict(second.state_dict())
        assert torch.equal(first(x), other)
        assert torch.equal(again(x), want)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_results_hang_on_no_default_of_torch(dtype):
    points, x, sampler = torch.randn(40, 20, 4), torch.randn(30, 2, 8), TokenSample(8, 6, 3)
    found, sample = local_curvature(points, 5), sampler(x)
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            again, sampled = local_curvature(points, 5), sampler(x)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) for a, b in zip((*found, sample), (*again, sampled), strict=True))


@pytest.mark.parametrize("stride", [0, -1, 1.5])
def test_a_stride_below_one_is_refused(stride):
    with pytest.raises(lw.InputError, match="stride"):
        local_curvature(torch.randn(3, 20, 4), 5, stride)


@pytest.mark.parametrize("stride", [20, 2**31 - 1, 2**33])
def test_a_stride_over_the_tokens_measures_the_first(stride):
    points = torch.randn(3, 20, 4)
    found = local_curvature(points, 5, stride)
    assert found[1].tolist() == [1, 1, 1]
    torch.testing.assert_close(found[0].double(), local_curvature(points.double(), 5, stride)[0], rtol=1e-3, atol=1e-5)


def test_points_that_the_kernels_cannot_fill(calls):
    sampler, x = TokenSample(8, 6, 3), torch.randn(30, 2, 8)
    wanted = sampler(x)
    others = (torch.zeros(2, 6, 3, dtype=torch.bfloat16), torch.zeros(2, 6, 6)[..., ::2], torch.zeros(2, 3, 6).mT)
    for points in others:
        assert sampler(x, points) is points
        torch.testing.assert_close(points.float(), wanted, rtol=1e-2, atol=1e-5)
    assert len(calls) == 1


def test_a_sample_made_in_inference_mode():
    with torch.inference_mode():
        sampler = TokenSample(8, 6, 3)
    x = torch.randn(30, 2, 8)
    torch.testing.assert_close(sampler(x), TokenSample(8, 6, 3)(x))
