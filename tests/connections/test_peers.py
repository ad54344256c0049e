"""Same function, same parameters as DeepSeek-V4's module in transformers: outputs and gradients with shared weights."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from cases import branch_for, error, random_site, rms_error, run, run_reference

import laneway as lw

v4 = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4", reason="needs the `peers` extra")
pytestmark = pytest.mark.peers
NAMES = ("y", "x", "fn", "base", "scale")


def v4_module(site: lw.HyperConnection) -> torch.nn.Module:
    config = SimpleNamespace(
        hc_mult=site.streams, hc_sinkhorn_iters=site.iterations, hc_eps=site.eps, rms_norm_eps=site.norm_eps, hidden_size=site.dim
    )
    module = v4.DeepseekV4HyperConnection(config)
    module.load_state_dict(site.state_dict())
    return module


def run_v4(module, x, branch, gy):
    """As the decoder layer of transformers mixes: comb is applied transposed, maps are cast to the streams' dtype."""
    x = x.detach()[None].requires_grad_()
    post, comb, h = module(x)
    f = branch(h)
    y = post.to(x.dtype).unsqueeze(-1) * f.unsqueeze(-2) + torch.matmul(comb.to(x.dtype).transpose(-1, -2), x)
    y.backward(gy[None])
    return [y.detach()[0], x.grad[0], module.fn.grad, module.base.grad, module.scale.grad]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_fp32_outputs_and_gradients_agree(n, eps):
    site = random_site(32, n, cap=None, eps=eps, norm_eps=1e-6)
    x, gy, branch = torch.randn(50, n, 32), torch.randn(50, n, 32), branch_for(32)
    for name, ours, theirs in zip(NAMES, run(site, x, branch, gy), run_v4(v4_module(site), x, branch, gy), strict=True):
        assert error(ours, theirs.double()) < 2e-5, name


def test_bf16_differs_by_their_rounding_only():
    """Both against float64: ours is no further away than theirs."""
    site = random_site(64, 4, cap=None, eps=1e-6, norm_eps=1e-6)
    x, gy, branch = torch.randn(200, 4, 64).bfloat16(), torch.randn(200, 4, 64).bfloat16(), branch_for(64)
    want = run_reference(site, x, branch, gy)
    for name, ours, theirs, exact in list(
        zip(NAMES, run(site, x, branch, gy), run_v4(v4_module(site), x, branch, gy), want, strict=True)
    )[:3]:
        assert rms_error(ours, exact) <= 1.2 * rms_error(theirs, exact), name


def test_the_head_agrees():
    config = SimpleNamespace(hc_mult=4, hc_eps=1e-6, rms_norm_eps=1e-6, hidden_size=32)
    head, readout = v4.DeepseekV4HyperHead(config), lw.StreamReadout(32, 4, eps=1e-6)
    with torch.no_grad():
        readout.fn.normal_(std=0.1)
        readout.base.normal_()
        readout.scale.uniform_(0.5, 1.5)
    head.load_state_dict({f"hc_{name}": value for name, value in readout.state_dict().items()})
    x = torch.randn(2, 9, 4, 32)
    torch.testing.assert_close(readout(x), head(x), rtol=1e-5, atol=1e-6)
