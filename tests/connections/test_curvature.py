"""The curvature estimate: by its definition, on clouds of known curvature, and with tokens that are no numbers."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from clouds import ball, cap, curvature_by_definition, roll, rotated
from torch.utils._python_dispatch import TorchDispatchMode

import laneway as lw
from laneway.connections.curvature import MovingCurvature, TokenSample, local_curvature, lower_median

WIDTH = 48


def kappa(clouds, k=12):
    """κ of clouds [B, S, d], pooled."""
    total, count = local_curvature(clouds, k)
    return total.sum().item() / count.sum().item()


def projected(y, clouds=6, dims=16):
    """[clouds, S, d]: each time another orientation and another projection, in fp32."""
    seeds = torch.randint(2**31, (clouds,)).tolist()
    return torch.cat([TokenSample(WIDTH, len(y), dims, seed)(rotated(y, WIDTH).float()[:, None]) for seed in seeds])


@pytest.mark.parametrize(("tokens", "dims", "k"), [(40, 8, 5), (33, 16, 12), (14, 3, 13), (24, 2, 2)])
def test_the_estimate_is_its_definition(tokens, dims, k):
    clouds = torch.stack([torch.randn(tokens, dims), ball(tokens, dims).float() * 1e4 + 7, torch.randn(tokens, dims).exp()])
    clouds[2, 3], clouds[2, 5] = float("nan"), clouds[2, 6]
    total, count = local_curvature(clouds.double(), k)
    narrow, narrow_count = local_curvature(clouds, k)
    for b, cloud in enumerate(clouds):
        want, tokens_in = curvature_by_definition(cloud, k)
        assert count[b] == narrow_count[b] == tokens_in
        assert total[b].item() == pytest.approx(want, rel=1e-8, abs=1e-12)
        assert narrow[b].item() == pytest.approx(want, rel=2e-2, abs=1e-4)  # in fp32 neighbours at equal distances may swap
    assert narrow.dtype == torch.float32


@pytest.mark.parametrize(("dims", "bound"), [(1, 1e-4), (2, 2e-3), (3, 1.2e-2)])
def test_a_plane_is_flat_in_any_orientation_at_any_scale(dims, bound):
    """But for tokens at its edge, whose neighbours all lie on one side."""
    for scale in (1e-15, 1.0, 1e15):
        assert kappa(projected(ball(128, dims) * 3) * scale) < bound


def slopes(values):
    return [math.log2(b / a) for a, b in itertools.pairwise(values)]


@pytest.mark.parametrize("shape", ["sphere", "swiss roll"])
def test_curvature_goes_as_one_over_the_radius(shape):
    """The same sheet of points bent to radii from 32 to 2: κ doubles with each halving (exponent 1, no transform needed)."""
    torch.manual_seed(seed := torch.randint(2**31, ()).item())
    sheet = ball(128, 2) if shape == "sphere" else torch.rand(128, 2, dtype=torch.float64) * 2 - 1
    found = []
    for radius in (32, 16, 8, 4, 2):
        torch.manual_seed(seed)  # the same projections
        bent = cap(sheet, radius) if shape == "sphere" else roll(sheet[:, 0], sheet[:, 1], radius)
        found.append(kappa(projected(bent)))
    assert all(0.6 < slope < 1.1 for slope in slopes(found)), found
    assert math.log2(found[-1] / found[0]) / 4 == pytest.approx(1, abs=0.2)
    torch.manual_seed(seed)
    assert kappa(projected(cap(sheet, 0.7))) > found[-1] > 5 * found[0]


def test_curvature_is_the_neighbours_distance_over_twice_the_radius():
    """The formula itself, without a projection: δ² is the mean square distance of the k neighbours."""
    radius, k = 6.0, 12
    y = cap(ball(400, 2), radius)
    square = torch.cdist(y, y).topk(k + 1, largest=False).values[:, 1:].square().mean().item()
    assert kappa(y[None], k) == pytest.approx(math.sqrt(square) / (2 * radius), rel=0.35)


def test_scale_and_offset_do_not_matter():
    clouds = torch.randn(4, 50, 8)
    want = torch.stack(local_curvature(clouds, 6))
    assert torch.equal(torch.stack(local_curvature(clouds * 2.0**40, 6)), want)
    assert torch.equal(torch.stack(local_curvature(clouds * 2.0**-40, 6)), want)
    torch.testing.assert_close(torch.stack(local_curvature(clouds + 100, 6)), want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_a_poisoned_token_is_left_out_and_nothing_else_changes(poison):
    clouds = torch.randn(3, 40, 8)
    bad = clouds.clone()
    bad[1, 17, 2] = poison
    total, count = local_curvature(bad, 6)
    want, _ = local_curvature(clouds, 6)
    without, without_count = local_curvature(torch.cat([clouds[1:2, :17], clouds[1:2, 18:]], dim=1), 6)
    assert torch.equal(total[[0, 2]], want[[0, 2]])
    assert count.tolist() == [40, 39, 40]
    assert total[1].item() == pytest.approx(without[0].item(), rel=1e-4)
    assert without_count == 39


def test_huge_tokens_do_not_blind_the_others():
    clouds = torch.randn(1, 60, 8)
    bad = torch.cat([clouds, torch.full((1, 2, 8), 1e30), torch.full((1, 1, 8), 3e38)], dim=1)
    total, count = local_curvature(bad, 6)
    assert torch.isfinite(total).all()
    assert count >= 60
    assert total.item() == pytest.approx(local_curvature(clouds, 6)[0].item(), abs=3.1)


def test_clouds_without_a_neighbourhood_have_nothing_of_nothing():
    """Too few finite tokens, or all the same."""
    clouds = torch.randn(4, 9, 3)
    clouds[0, 4:], clouds[1], clouds[2] = float("nan"), float("nan"), 2.5
    total, count = local_curvature(clouds, 5)
    assert count.tolist() == [0, 0, 0, 9]
    assert total[:3].tolist() == [0, 0, 0]


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("shape", ["plane", "sphere", "noise"])
def test_copies_change_nothing(shape, backend):
    """Half of the tokens several times over, in any order: κ of the cloud without the copies, but for the tokens' places."""
    sheet = ball(40, 2)
    y = {"plane": sheet, "sphere": cap(sheet, 2), "noise": torch.randn(40, 9)}[shape].float()
    copied = torch.cat([y, y[:20].repeat(3, 1)])[torch.randperm(100)]
    with lw.use_backend(backend):
        (total, count), (want, tokens) = local_curvature(copied[None], 12), local_curvature(y[None], 12)
    assert count.item() == tokens.item() == 40
    assert total.item() == pytest.approx(want.item(), rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_copies_of_one_token_do_not_set_the_scale(backend):
    """Most tokens the same: distances are still measured in units of those that differ."""
    cloud = torch.randn(20, 4)
    copied = torch.cat([cloud, cloud[:1].expand(60, 4)])
    with lw.use_backend(backend):
        for scale in (1e-30, 1.0, 1e30):
            total, count = local_curvature(copied[None] * scale, 6)
            assert count.item() == 20
            assert total.item() == pytest.approx(local_curvature(cloud[None], 6)[0].item(), rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_copies_of_few_tokens_are_no_neighbourhood(backend):
    clouds = torch.randn(2, 6, 3)[:, torch.arange(48) % 6]
    with lw.use_backend(backend):
        assert [found.tolist() for found in local_curvature(clouds, 6)] == [[0, 0], [0, 0]]
        assert local_curvature(clouds, 5)[1].tolist() == [6, 6]


def test_many_clouds_are_each_alone():
    clouds = torch.randn(300, 10, 3)
    total, _ = local_curvature(clouds, 4)
    assert torch.equal(total[150], local_curvature(clouds[150:151], 4)[0][0])


def test_a_stride_takes_every_so_many_tokens_with_neighbours_among_all():
    clouds = torch.randn(3, 40, 6)
    clouds[1, 4] = float("nan")
    for stride in (2, 3):
        total, count = local_curvature(clouds, 5, stride)
        assert count.tolist() == [len(range(0, 40, stride)) - (i == 1 and 4 % stride == 0) for i in range(3)]
        singles = torch.zeros(3)
        for at in range(0, 40, stride):  # that token first, all others behind it: a stride as long as the cloud takes it alone
            singles += local_curvature(torch.cat([clouds[:, at:], clouds[:, :at]], 1), 5, 40)[0]
        torch.testing.assert_close(total, singles, rtol=1e-3, atol=1e-4)


class HostReads(TorchDispatchMode):
    """Fails where a number goes to the host or a shape hangs on values: what a CUDA graph can't hold."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.name() not in ("aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::masked_select"), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_nothing_goes_to_the_host(backend):
    moving, sample = MovingCurvature(4), TokenSample(8, 16, 4)
    x = torch.randn(3, 10, 4, 8)
    with lw.use_backend(backend), HostReads():
        moving.update(*local_curvature(sample(x), 5))
        _ = moving.curvature, moving.median
    assert torch.isfinite(moving.curvature).all()


def test_bad_numbers_are_named():
    with pytest.raises(lw.InputError, match="projection: got 9; accepted: an integer from 1 to 8"):
        TokenSample(8, 16, 9)
    with pytest.raises(lw.InputError, match="projection: got 33; accepted: an integer from 1 to 32"):
        TokenSample(64, 16, 33)
    with pytest.raises(lw.InputError, match="sample: got 12; accepted: more tokens than neighbours = 12"):
        local_curvature(torch.randn(1, 12, 3), 12)
    with pytest.raises(lw.InputError, match="neighbours: got 1; accepted: an integer ≥ 2"):
        local_curvature(torch.randn(1, 12, 3), 1)
    with pytest.raises(lw.InputError, match="decay: got 1"):
        MovingCurvature(2, 1)


# ---------------------------------------------------------------- which tokens, and over time


@pytest.mark.parametrize("lead", [(400,), (20, 20), (7,), (1,), (0,), ()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_sample_has_one_size_and_the_projection_is_the_seeds(lead, dtype):
    sample, again = TokenSample(12, 16, 5, seed=3), TokenSample(12, 16, 5, seed=3)
    x = torch.randn(*lead, 4, 12).to(dtype)
    points, tokens = sample(x), math.prod(lead)
    assert points.shape == (4, 16, 5)
    assert points.dtype == torch.float32
    assert torch.isfinite(points).all(-1).sum(-1).tolist() == [min(tokens, 16)] * 4
    torch.testing.assert_close(points, again(x), rtol=0, atol=0, equal_nan=True)
    assert not torch.equal(sample.projection, TokenSample(12, 16, 5, seed=4).projection)
    if tokens > 16:
        rows = (points[0, :, None] - (x.float().reshape(-1, 4, 12)[:, 0] @ sample.projection)).abs().sum(-1).argmin(-1)
        assert (rows // (tokens // 16)).tolist() == list(range(16))  # one out of each stretch


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_a_sample_costs_the_same_for_any_batch(backend):
    class Biggest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out._base is None and "view" not in func.name():
                self.size = max(self.size, out.numel())
            return out

    sizes = []
    for tokens in (100, 10_000):
        x = torch.randn(tokens, 4, 12)
        with lw.use_backend(backend), Biggest() as biggest:
            TokenSample(12, 16, 5)(x)
        sizes.append(biggest.size)
    assert 16 * 4 * 5 <= sizes[0] == sizes[1] <= 16 * 4 * 12


def test_the_average_has_no_bias_and_the_median_is_the_windows():
    moving = MovingCurvature(3, decay=0.8, window=4)
    assert torch.isnan(moving.curvature).all()
    values = torch.rand(7) + 0.5
    seen = []
    for step, value in enumerate(values):
        present = 0.0 if step == 2 else 5.0  # path 2 has no token at step 2
        moving.update(torch.stack([value * 4, value * 4, value * present]), torch.tensor([4.0, 4, present]))
        weights = 0.8 ** torch.arange(step, -1, -1)
        seen.append((weights @ values[: step + 1]) / weights.sum())
        torch.testing.assert_close(moving.curvature[0], seen[-1])
    torch.testing.assert_close(moving.median[0], lower_median(torch.stack(seen[-4:])))
    kept = values[[0, 1, 3, 4, 5, 6]]
    weights = 0.8 ** torch.arange(5, -1, -1)
    torch.testing.assert_close(moving.curvature[2], (weights @ kept) / weights.sum())


def test_lower_median_leaves_nan_out():
    values = torch.tensor([[3.0, 1.0, float("nan")], [float("nan"), 2.0, float("nan")], [1.0, 9.0, float("nan")]])
    assert lower_median(values)[:2].tolist() == [1.0, 2.0]
    assert lower_median(values)[2].isnan()
