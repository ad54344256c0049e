"""Channel-first streams: the same site behind a change of view, and what that costs."""

from __future__ import annotations

import pytest
import torch
from cases import branch_for, error, random_site, run, run_reference

import laneway as lw
from laneway.bench.memory import peak_bytes
from laneway.connections.channels import ChannelFirst, channels_first, channels_last

PLACES = ((7,), (5, 3), (2, 3, 4), ())
LAYOUTS = {"as a site leaves them": channels_first, "contiguous": lambda x: channels_first(x).contiguous()}


def run_first(site: lw.HyperConnection, x: torch.Tensor, branch, gy: torch.Tensor) -> list[torch.Tensor]:
    """What ``cases.run`` does, by a channel-first site: x and gy [B, n, C, …places]; the results are channel-last again."""
    x = x.detach().requires_grad_()
    site.zero_grad()
    h, merge = ChannelFirst(site)(x)
    assert h.shape == (x.shape[0], *x.shape[2:])
    y = merge(branch(h.movedim(1, -1)).movedim(-1, 1))
    assert y.shape == x.shape
    y.backward(gy)
    return [channels_last(y.detach()), channels_last(x.grad), site.fn.grad, site.base.grad, site.scale.grad]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("places", PLACES, ids=str)
@pytest.mark.parametrize("manifold", ["sinkhorn", "orthogonal", "none"])
def test_equal_to_the_channel_last_site_bit_for_bit(manifold, places, layout):
    site, branch = random_site(16, 4, manifold), branch_for(16)
    x, gy = torch.randn(3, *places, 4, 16), torch.randn(3, *places, 4, 16)
    want = [t.clone() for t in run(site, x, branch, gy)]
    got = run_first(site, LAYOUTS[layout](x), branch, LAYOUTS[layout](gy))
    for name, a, b in zip(("y", "x", "fn", "base", "scale"), got, want, strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_equal_in_other_dtypes_too(dtype):
    site, branch = random_site(16, 3), branch_for(16)
    x, gy = torch.randn(2, 4, 5, 3, 16, dtype=dtype), torch.randn(2, 4, 5, 3, 16, dtype=dtype)
    want = [t.clone() for t in run(site, x, branch, gy)]
    for a, b in zip(run_first(site, channels_first(x), branch, channels_first(gy)), want, strict=True):
        assert torch.equal(a, b)


def test_the_published_formula():
    site, branch = random_site(16, 4), branch_for(16)
    x, gy = torch.randn(3, 5, 3, 4, 16), torch.randn(3, 5, 3, 4, 16)
    got = run_first(site, channels_first(x).contiguous(), branch, channels_first(gy))
    for a, b in zip(got, run_reference(site, x, branch, gy), strict=True):
        assert error(a, b) < 1e-5


def test_one_stream_is_the_plain_residual():
    site = ChannelFirst(lw.HyperConnection(8, 1))
    x = torch.randn(2, 1, 8, 3, 3)
    h, merge = site(x)
    assert torch.equal(h, x[:, 0])
    assert torch.equal(merge(h.tanh()), x + x.tanh())
    assert not list(site.parameters())


def test_what_a_convolution_gets_and_gives_needs_no_copy():
    site, conv = ChannelFirst(random_site(8, 4)), torch.nn.Conv2d(8, 8, 3, padding=1)
    x = channels_first(torch.randn(2, 6, 5, 4, 8))
    for _ in range(2):
        h, merge = site(x)
        assert h.is_contiguous(memory_format=torch.channels_last)
        f = conv(h)
        assert f.is_contiguous(memory_format=torch.channels_last)
        x = merge(f)
        assert channels_last(x).is_contiguous()


def test_contiguous_streams_cost_one_copy_of_them():
    site = ChannelFirst(random_site(512, 4))  # wide, so that the maps' own memory is small beside the streams
    view = channels_first(torch.randn(2, 8, 8, 4, 512))
    contiguous, streams = view.contiguous(), view.numel() * view.element_size()

    def both_ways(x: torch.Tensor) -> torch.Tensor:
        h, merge = site(x)
        return merge(h)

    with torch.no_grad():
        extra = peak_bytes(lambda: both_ways(contiguous)) - peak_bytes(lambda: both_ways(view))
    assert extra == streams


def test_places_do_not_see_each_other():
    site = ChannelFirst(random_site(8, 4))
    x = torch.randn(1, 4, 8, 3, 3)
    before = site(x)[0]
    x[..., 1, 1] += 1
    after = site(x)[0]
    changed = (before != after).any(1)[0]
    assert changed[1, 1]
    assert changed.sum() == 1


def test_a_probe_and_the_parameter_groups_find_the_site():
    module = torch.nn.Sequential(ChannelFirst(random_site(8, 4)))
    with lw.StreamProbe(module) as probe:
        module[0](torch.randn(2, 4, 8, 3, 3))
    assert abs(probe.summary()["gain_forward"] - 1) < 1e-4
    (group,) = lw.param_groups(module, weight_decay=0.1)
    assert group["weight_decay"] == 0.0
    assert len(group["params"]) == 3


@pytest.mark.parametrize("shape", [(2, 4), (2, 8, 4, 3, 3), (2, 3, 3, 4, 8), (4, 8)])
def test_other_shapes_are_refused(shape):
    with pytest.raises(lw.InputError) as caught:
        ChannelFirst(random_site(8, 4))(torch.randn(shape))
    assert caught.value.field == "x"
    assert "[B, streams = 4, dim = 8, …places]" in str(caught.value)


def test_an_output_of_another_shape_is_refused():
    _, merge = ChannelFirst(random_site(8, 4))(torch.randn(2, 4, 8, 3, 3))
    with pytest.raises(lw.InputError, match=r"\[2, 8, 3, 3\]"):
        merge(torch.randn(2, 3, 3, 8))
