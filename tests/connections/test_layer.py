"""The layer against the float64 reference, and everything a user may hand to it."""

from __future__ import annotations

import pytest
import torch
from cases import branch_for, error, random_site, rms_error, run, run_reference
from hypothesis import given, settings
from hypothesis import strategies as st

import laneway as lw
from laneway.connections import manifolds

DISTRIBUTED_SHAPES = [(), (1,), (7,), (2, 3), (2, 1, 5), (0,), (4, 0)]
NAMES = ("y", "x", "fn", "base", "scale")


@pytest.mark.parametrize("manifold", ["sinkhorn", "none"])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6])
def test_equals_the_reference_in_fp32(manifold, n):
    site = random_site(24, n, manifold)
    x, gy, branch = torch.randn(2, 9, n, 24), torch.randn(2, 9, n, 24), branch_for(24)
    for name, got, want in zip(NAMES, run(site, x, branch, gy), run_reference(site, x, branch, gy), strict=True):
        assert error(got, want) < 1e-5, name


@settings(deadline=None, max_examples=40)
@given(
    st.integers(0, 2**31 - 1),
    st.integers(1, 6),
    st.sampled_from([1, 3, 17, 32]),
    st.sampled_from([0, 1, 2, 3, 31, 33, 127]),
    st.sampled_from([0.0, 1e-6]),
    st.sampled_from([None, 8.0]),
    st.sampled_from([1, 20]),
)
def test_any_size_and_option(seed, n, dim, tokens, eps, cap, iterations):
    torch.manual_seed(seed)
    site = random_site(dim, n, eps=eps, cap=cap, iterations=iterations)
    x, gy, branch = torch.randn(tokens, n, dim), torch.randn(tokens, n, dim), branch_for(dim)
    for name, got, want in zip(NAMES, run(site, x, branch, gy), run_reference(site, x, branch, gy), strict=True):
        assert got.shape == want.shape
        assert error(got, want) < 1e-4, name


@pytest.mark.parametrize("manifold", ["sinkhorn", "none"])
@pytest.mark.parametrize("streams", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("maps", [torch.float64, torch.float32])
def test_any_pair_of_dtypes(manifold, streams, maps):
    site = random_site(16, 4, manifold, dtype=maps)
    x, gy, branch = torch.randn(11, 4, 16).to(streams), torch.randn(11, 4, 16).to(streams), branch_for(16)
    bound = 0.05 if streams == torch.bfloat16 else 1e-5
    for name, got, want in zip(NAMES, run(site, x, branch, gy), run_reference(site, x, branch, gy), strict=True):
        assert got.dtype == (streams if name in "yx" else maps)
        assert error(got, want) < bound, name


@pytest.mark.parametrize("manifold", ["sinkhorn", "none"])
def test_float64_streams_are_exact(manifold):
    site = random_site(16, 4, manifold, dtype=torch.float64)
    x, gy, branch = torch.randn(11, 4, 16).double(), torch.randn(11, 4, 16).double(), branch_for(16)
    for name, got, want in zip(NAMES, run(site, x, branch, gy), run_reference(site, x, branch, gy), strict=True):
        assert error(got, want) < 1e-12, name


@pytest.mark.parametrize("manifold", ["sinkhorn", "none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_streams_err_no_more_than_twice_plain_pytorch(manifold, dtype):
    """Against float64: our error at most 2 × that of the reference's formulas run by PyTorch in the streams' own dtype."""
    wide = branch_for(64)

    def branch(h):  # rounded once, so that the error is the connection's and not the sub-layer's
        return wide(h.double()).to(h.dtype)

    ours, theirs = torch.zeros(5), torch.zeros(5)
    for _ in range(12):  # pooled: scale has three numbers only
        site = random_site(64, 4, manifold)
        x, gy = torch.randn(257, 4, 64).to(dtype), torch.randn(257, 4, 64).to(dtype)
        got, plain, want = (f(site, x, branch, gy) for f in (run, _plain_low_precision, run_reference))
        ours += torch.tensor([rms_error(*pair) for pair in zip(got, want, strict=True)]).square()
        theirs += torch.tensor([rms_error(*pair) for pair in zip(plain, want, strict=True)]).square()
        assert got[0].dtype == got[1].dtype == dtype
        assert got[2].dtype == torch.float32
    assert (ours.sqrt() <= 2 * theirs.sqrt() + 1e-6).all(), dict(zip(NAMES, (ours / theirs).sqrt().tolist(), strict=True))


def _plain_low_precision(site, x, branch, gy):
    """Maps in fp32, mixing in the streams' dtype: what eager implementations do."""
    from laneway.connections import reference as ref

    x, fn, base, scale = (t.detach().clone().requires_grad_() for t in (x, site.fn, site.base, site.scale))
    n = x.shape[-2]
    if site.manifold == "none":
        pre, post, res = torch.tanh(ref.rms_norm(x.float(), site.norm_eps) @ fn.T).split([1, 1, n], -1)
        b_pre, b_post, b_res = base.split([n, n, n * n])
        h_pre, h_post = scale[0] * pre[..., 0] + b_pre, scale[1] * post[..., 0] + b_post
        h_res = (scale[2] * res + b_res.view(n, n)).transpose(-1, -2)
    else:
        pre, post, res = ref.map_logits(x.float(), fn, base, scale, site.norm_eps)
        h_pre, h_post = ref.pre_map(pre, site.eps), ref.post_map(post)
        h_res = ref.sinkhorn(ref.cap_logits(res, site.cap), site.iterations, site.eps)
    h = (h_pre.to(x.dtype).unsqueeze(-1) * x).sum(-2)
    y = h_res.to(x.dtype) @ x + h_post.to(x.dtype).unsqueeze(-1) * branch(h).unsqueeze(-2)
    y.backward(gy)
    return [y.detach(), x.grad, fn.grad, base.grad, scale.grad]


@pytest.mark.parametrize("manifold", manifolds.MANIFOLDS)
@pytest.mark.parametrize("lead", DISTRIBUTED_SHAPES)
def test_any_leading_shape(manifold, lead):
    site = random_site(8, 3, manifold)
    x = torch.randn(*lead, 3, 8, requires_grad=True)
    h, merge = site(x)
    y = merge(torch.tanh(h))
    assert h.shape == (*lead, 8)
    assert y.shape == x.shape
    y.square().sum().backward()
    for gradient in (x.grad, site.fn.grad, site.base.grad, site.scale.grad):
        assert gradient is not None
        assert torch.isfinite(gradient).all()
    if 0 in lead:
        assert not site.fn.grad.any()


def test_non_contiguous_streams():
    site, branch = random_site(8, 4), branch_for(8)
    dense = torch.randn(5, 4, 8)
    channel_first = dense.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert not channel_first.is_contiguous()
    gy = torch.randn(4, 5, 8).transpose(0, 1)
    for a, b in zip(run(site, dense, branch, gy.contiguous()), run(site, channel_first, branch, gy), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_rows_of_h_res_sum_to_one_forward():
    """Orientation: streams that are all equal pass H_res unchanged."""
    site = random_site(8, 4, spread=4.0)
    x = torch.randn(50, 1, 8).expand(50, 4, 8)
    _, merge = site(x)
    torch.testing.assert_close(merge(torch.zeros(50, 8)), x.contiguous(), atol=1e-5, rtol=0)


def test_slice_order_is_pre_post_res():
    """Distinct biases show which rows are which: pre 1/2 on stream 0, post on stream 1, res sends stream 0 to stream 1."""
    site = lw.HyperConnection(2, 2, cap=None)
    far = 60.0
    with torch.no_grad():
        site.base.copy_(torch.tensor([0.0, -far, -far, 0.0, -far, far, far, -far]))
    x = torch.tensor([[[1.0, 2.0], [10.0, 20.0]]])
    h, merge = site(x)
    torch.testing.assert_close(h, torch.tensor([[0.5, 1.0]]))
    torch.testing.assert_close(merge(torch.tensor([[100.0, 200.0]])), torch.tensor([[[10.0, 20.0], [101.0, 202.0]]]))


def test_large_streams_stay_finite_in_bf16():
    site, branch = random_site(32, 4), branch_for(32)
    x = (torch.randn(20, 4, 32) * 1e4).bfloat16()
    for tensor in run(site, x, branch, torch.randn(20, 4, 32).bfloat16()):
        assert torch.isfinite(tensor).all()


def test_a_poisoned_token_touches_no_other():
    site, branch = random_site(8, 4), branch_for(8)
    x, gy = torch.randn(9, 4, 8), torch.randn(9, 4, 8)
    clean = run(site, x, branch, gy)
    x[4, 2, 3] = float("nan")
    poisoned = run(site, x, branch, gy)
    others = torch.arange(9) != 4
    for a, b in zip(clean[:2], poisoned[:2], strict=True):
        torch.testing.assert_close(a[others], b[others], rtol=0, atol=0)


def test_second_backward_accumulates_the_same_gradient():
    site = random_site(8, 4)
    x = torch.randn(6, 4, 8, requires_grad=True)
    h, merge = site(x)
    loss = merge(h * 2).square().sum()
    first = torch.autograd.grad(loss, [x, site.fn], retain_graph=True)
    second = torch.autograd.grad(loss, [x, site.fn])
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def test_merging_twice_is_two_uses_of_the_streams():
    """Not a usual thing to do, but its gradient must be right."""
    site, x = random_site(8, 3, dtype=torch.float64), torch.randn(4, 3, 8, dtype=torch.float64)

    def twice(x):
        h, merge = site(x)
        return merge(h) + merge(h.tanh())

    assert torch.autograd.gradcheck(twice, (x.requires_grad_(),))


def test_without_merge_the_gradient_is_that_of_the_pre_mix():
    site, x = random_site(8, 3, dtype=torch.float64), torch.randn(4, 3, 8, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: site(x)[0], (x.requires_grad_(),))


def test_training_and_no_grad_give_the_same_numbers():
    site, x = random_site(8, 4), torch.randn(6, 4, 8)
    h, merge = site(x)
    with torch.no_grad():
        h0, merge0 = site(x)
    assert torch.equal(h, h0)
    assert torch.equal(merge(h), merge0(h0))


def test_micro_batches_add_up():
    site, branch = random_site(8, 4, dtype=torch.float64), branch_for(8)
    x, gy = torch.randn(10, 4, 8).double(), torch.randn(10, 4, 8).double()
    whole = run(site, x, branch, gy)[2:]
    site.zero_grad()
    for part in (slice(0, 3), slice(3, 10)):
        h, merge = site(x[part])
        merge(branch(h)).backward(gy[part])
    for got, want in zip((site.fn.grad, site.base.grad, site.scale.grad), whole, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("frozen", ["maps", "streams"])
def test_frozen_parts(frozen):
    site, x = random_site(8, 4), torch.randn(6, 4, 8, requires_grad=frozen != "streams")
    if frozen == "maps":
        site.requires_grad_(False)
    h, merge = site(x)
    merge(h.tanh()).square().sum().backward()
    assert (x.grad is None) == (frozen == "streams")
    assert (site.fn.grad is None) == (frozen == "maps")


def test_branch_with_several_inputs_and_another_dtype():
    site, x = random_site(8, 4), torch.randn(6, 4, 8, requires_grad=True)
    mask = torch.rand(6, 8)
    h, merge = site(x)
    f = (h * mask).bfloat16()
    y = merge(f)
    assert y.dtype == torch.float32
    y.sum().backward()
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("streams", [1, 4])
def test_disabled_is_the_plain_residual(streams):
    site = lw.HyperConnection(8, streams, disable=True)
    assert list(site.parameters()) == []
    x = torch.randn(5, streams, 8)
    h, merge = site(x)
    torch.testing.assert_close(h, x.mean(-2))
    torch.testing.assert_close(merge(h), x + h[:, None])


def test_one_stream_has_no_parameters_by_default():
    assert list(lw.HyperConnection(8, 1).parameters()) == []
    x = torch.randn(3, 1, 8)
    h, merge = lw.HyperConnection(8, 1)(x)
    assert torch.equal(h, x[:, 0])
    assert torch.equal(merge(h), x + h[:, None])


@pytest.mark.parametrize(
    ("arguments", "field", "part"),
    [
        ({"streams": 0}, "streams", "an integer ≥ 1"),
        ({"streams": -2}, "streams", "an integer ≥ 1"),
        ({"streams": 2.0}, "streams", "an integer ≥ 1"),
        ({"dim": 0}, "dim", "an integer ≥ 1"),
        ({"manifold": "sinkhron"}, "manifold", "did you mean 'sinkhorn'?"),
        ({"iterations": 0}, "iterations", "an integer ≥ 1"),
        ({"cap": 0.0}, "cap", "a number > 0"),
        ({"cap": float("nan")}, "cap", "a number > 0"),
        ({"eps": -1e-6}, "eps", "a number ≥ 0"),
        ({"norm_eps": float("nan")}, "norm_eps", "a number ≥ 0"),
        ({"site": -1}, "site", "an integer ≥ 0"),
        ({"dtype": torch.bfloat16}, "dtype", "never narrower"),
        ({"manifold": "birkhoff", "streams": 7}, "streams", "use sinkhorn"),
        ({"manifold": "kronecker", "streams": 14}, "streams", "use sinkhorn"),
    ],
)
def test_bad_arguments_are_named(arguments, field, part):
    with pytest.raises(lw.InputError) as caught:
        lw.HyperConnection(**{"dim": 8, "streams": 4, **arguments})
    assert caught.value.field == field
    assert part in str(caught.value)


def test_bad_inputs_are_named():
    site = lw.HyperConnection(8, 4)
    with pytest.raises(lw.InputError, match=r"x: got \[2, 3, 8\]"):
        site(torch.randn(2, 3, 8))
    _, merge = site(torch.randn(2, 4, 8))
    with pytest.raises(lw.InputError, match=r"f: got \[3, 8\]"):
        merge(torch.randn(3, 8))
    with pytest.raises(TypeError, match="floating"):
        site(torch.ones(2, 4, 8, dtype=torch.int64))


@pytest.mark.parametrize("kind", ["learned", "mean", "sum"])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_readout(kind, n):
    readout, x = lw.StreamReadout(8, n, kind), torch.randn(3, 5, n, 8)
    want = {"learned": x.mean(-2) * 0, "mean": x.mean(-2), "sum": x.sum(-2)}[kind]
    if kind == "learned" and n > 1:
        with torch.no_grad():
            readout.fn.normal_(std=0.2)
            readout.base.normal_()
        flat = x.flatten(-2).double()
        unit = flat / (flat.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        weight = torch.sigmoid(unit @ readout.fn.T.double() * readout.scale.double() + readout.base.double())
        want = torch.einsum("btn,btnc->btc", weight, x.double()).float()
    elif kind == "learned":
        want = x[..., 0, :]
    torch.testing.assert_close(readout(x), want)


def test_learned_readout_gradcheck():
    readout, x = lw.StreamReadout(4, 3).double(), torch.randn(3, 3, 4, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        readout.fn.normal_()
    parameters = [p.requires_grad_() for p in readout.parameters()]
    assert torch.autograd.gradcheck(lambda x, *_: readout(x), (x, *parameters))


def test_expand_repeats_and_spreads():
    x = torch.randn(2, 3, 8)
    assert torch.equal(lw.expand_streams(x, 4), x.unsqueeze(2).repeat(1, 1, 4, 1))
    spread = lw.expand_streams(x, 4, spread=0.25)
    torch.testing.assert_close(spread.mean(2), x)
    torch.testing.assert_close(spread[:, :, 0], 1.25 * x)
    with pytest.raises(lw.InputError, match="streams: got 0"):
        lw.expand_streams(x, 0)
