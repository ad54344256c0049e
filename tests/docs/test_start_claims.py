"""docs/start.md makes claims about gradients that are exactly zero, or are not. Here they are, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from pages import ROOT

import laneway as lw
from laneway.connections import expand_spread, reference, start
from laneway.models.gpt import GPT, GPTConfig

ZERO = 1e-13  # of the largest gradient: rounding in float64
PAGE = (ROOT / "docs" / "start.md").read_text("utf-8")


def network(residual="mhc", streams=4, spread=None, norm_eps=1e-14) -> GPT:
    """A small model in float64, its biases the exact ones (the fp32 model's hold them to rounding)."""
    torch.manual_seed(1)
    model = GPT(GPTConfig(dim=32, heads=2, layers=3, context=16, residual=residual, streams=streams, norm_eps=norm_eps)).double()
    model.spread = model.spread if spread is None else spread
    for site in sites(model):
        n = site.streams
        pre, post = start.read_weights(n, site.site).double(), start.write_weights(n).double()
        set_bias(site, pre / pre.sum(), post)
    return model


def sites(model: GPT) -> list[lw.HyperConnection]:
    return [m for m in model.modules() if isinstance(m, lw.HyperConnection)]


@torch.no_grad()
def set_bias(site, pre, post) -> None:
    n = site.streams
    site.base[:n], site.base[n : 2 * n] = torch.logit(pre), torch.logit(post / 2)


def gradients(model: GPT) -> dict[str, torch.Tensor]:
    """Largest gradient of the projection's rows of each map, site by site, over the model's largest."""
    tokens = torch.randint(0, 256, (2, 16))
    F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    found = {name: [] for name in ("pre", "post", "res")}
    for site in sites(model):
        n = site.streams
        for name, rows in zip(found, site.fn.grad.split([n, n, len(site.fn) - 2 * n]), strict=True):
            found[name].append(rows.abs().amax() if len(rows) else rows.new_zeros(()))
    largest = max(max(values) for values in found.values())
    return {name: torch.stack(values) / largest for name, values in found.items()}


def equal_streams(model: GPT) -> GPT:
    """Copies of the embedding and equal writes; reads stay different."""
    model.spread = 0.0
    for site in sites(model):
        set_bias(site, start.read_weights(4, site.site).double(), torch.ones(4).double())
    return model


def equal_reads(model: GPT) -> GPT:
    for site in sites(model):
        set_bias(site, torch.full((4,), 0.25).double(), start.write_weights(4).double())
    model.readout.base.data.fill_(float(torch.logit(torch.tensor(0.25).double())))
    return model


@pytest.mark.parametrize("residual", ["mhc", "mhc-lite", "kronecker"])
def test_equal_streams_leave_the_mix_without_gradient(residual):
    found = gradients(equal_streams(network(residual)))
    assert found["res"].max() < ZERO
    assert found["post"].min() > 1e-3


def test_equal_streams_leave_the_orthogonal_mix_a_gradient():
    assert gradients(equal_streams(network("orthogonal")))["res"].min() > 1e-3


def test_equal_streams_leave_reads_without_gradient_but_for_the_norms_epsilon():
    assert gradients(equal_streams(network()))["pre"].max() < 1e-9
    alive = gradients(equal_streams(network(norm_eps=1e-4)))["pre"]
    assert alive.max() > 1e-4


@pytest.mark.parametrize("residual", ["mhc-lite", "kronecker"])
def test_equal_reads_leave_an_exact_mix_without_gradient(residual):
    assert gradients(equal_reads(network(residual)))["res"].max() < ZERO


def test_equal_reads_leave_sinkhorn_only_its_unbalanced_columns():
    """A change of the column sums shrinks by a² an iteration, so the gradient is there and is gone with many iterations."""
    few = gradients(equal_reads(network()))["res"].max()
    assert few > 1e-6
    n, cap = 4, torch.tensor(1.0).tanh().double() * 8
    logits = (torch.eye(n) * cap).double()
    b = 1 / (cap.exp() + n - 1)
    a = 1 - n * b
    changes = []
    for iterations in (10, 20):
        jacobian = torch.autograd.functional.jacobian(lambda h, t=iterations: reference.sinkhorn(h, t).sum(-2), logits)
        changes.append(jacobian.norm())
    torch.testing.assert_close(changes[1] / changes[0], a**20, rtol=1e-6, atol=0)


def test_the_mix_at_the_start_has_the_form_the_page_says():
    for n in (3, 4, 5):
        cap = 8 * torch.tensor(1.0).double().tanh()
        b = 1 / (cap.exp() + n - 1)
        wanted = (1 - n * b) * torch.eye(n).double() + b
        torch.testing.assert_close(reference.sinkhorn(torch.eye(n).double() * cap), wanted)


def test_kronecker_and_two_streams_sleep():
    assert gradients(network("kronecker"))["res"].max() < ZERO * 1e6  # biases of the factors are fp32
    assert gradients(network("mhc", 2))["res"].max() < ZERO


def test_scale_has_no_gradient_and_the_first_read_has_none():
    model = network(spread=-start.WRITE)
    found = gradients(model)
    assert all(site.scale.grad.abs().max() == 0 for site in sites(model))
    assert found["pre"][0] < 1e-9
    assert found["pre"][1:].min() > 1e-4


def test_the_expansion_decides_whether_streams_are_collinear():
    """Equation (6): with s = 1 and a → 1 all streams stay collinear, and reads all but sleep; with s = −1 they don't."""
    together, apart = (gradients(network("identity", spread=s * start.WRITE))["pre"] for s in (1, -1))
    assert together.max() < 1e-9
    assert apart[1:].min() > 1e-4
    first = gradients(network(spread=0.0))["res"]
    assert first[0] < ZERO < first[1:].min()


def test_the_page_says_which_expansion_the_model_takes():
    assert f"`GPT` takes s = {expand_spread(4) / start.WRITE:g}.".replace("-", "−") in PAGE


def test_symmetric_starts_are_exactly_dead():
    """Section 5, for a mix bias that is not uniform: what training does to one stream it does to all."""
    model = equal_reads(network("mhc-lite", spread=0.0))
    for site in sites(model):
        set_bias(site, torch.full((4,), 0.25).double(), torch.ones(4).double())
    optimizer = torch.optim.AdamW(lw.param_groups(model), lr=3e-3)
    tokens = torch.randint(0, 256, (2, 16))
    for _ in range(5):
        optimizer.zero_grad()
        F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
    with torch.no_grad():
        x = lw.expand_streams(model.embedding(tokens), 4)
        for block in model.blocks:
            x = block(x, model.rotary)
    assert (x - x[..., :1, :]).abs().max() < 1e-6 * x.abs().max()
