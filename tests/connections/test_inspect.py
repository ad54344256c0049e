"""The probe's figures against their definitions."""

from __future__ import annotations

import math

import pytest
import torch
from cases import random_site

import laneway as lw
from laneway.connections import reference
from laneway.models.gpt import GPT, GPTConfig


class Chain(torch.nn.Module):
    def __init__(self, sites):
        super().__init__()
        self.sites = torch.nn.ModuleList(sites)

    def forward(self, x):
        for site in self.sites:
            h, merge = site(x)
            x = merge(torch.tanh(h))
        return x


@pytest.mark.parametrize("manifold", ["sinkhorn", "none", "orthogonal"])
def test_gains_are_those_of_the_product_over_depth(manifold):
    model = Chain([random_site(8, 4, manifold) for _ in range(5)])
    x, matrices = torch.randn(3, 7, 4, 8), []
    for site in model.sites:
        site.observers.append(lambda _site, _x, res: matrices.append(res.double()))
    with lw.StreamProbe(model) as probe:
        model(x)
    summary = probe.summary()
    for depth in range(5):
        forward, backward = reference.composite_gain(matrices[: depth + 1])
        assert summary["site_gain_forward"][depth] == pytest.approx(forward.mean().item(), rel=1e-4)
        assert summary["site_gain_backward"][depth] == pytest.approx(backward.mean().item(), rel=1e-4)
    assert summary["gain_forward"] == summary["site_gain_forward"][-1]
    if manifold == "sinkhorn":
        assert summary["gain_forward"] == pytest.approx(1.0, abs=1e-4)


def test_sinkhorn_error_is_the_largest_log_column_sum():
    site, seen = random_site(8, 4, spread=6.0, iterations=2, cap=None), []
    site.observers.append(lambda _site, _x, res: seen.append(res))
    with lw.StreamProbe(site) as probe:
        site(torch.randn(30, 4, 8))
    assert probe.summary()["sinkhorn_error"] == pytest.approx(seen[0].sum(-2).log().abs().max().item())
    assert probe.summary()["sinkhorn_error"] > 0.05


def test_collapse_is_the_mean_cosine_between_streams():
    site = random_site(8, 3)
    x = torch.randn(20, 3, 8)
    with lw.StreamProbe(site) as probe:
        site(x)
    pairs = [torch.cosine_similarity(x[:, i], x[:, j], dim=-1).mean() for i, j in ((0, 1), (0, 2), (1, 2))]
    assert probe.summary()["collapse"] == pytest.approx(torch.stack(pairs).mean().item(), abs=1e-6)
    with lw.StreamProbe(site) as probe:
        site(x[:, :1].expand(20, 3, 8))
    assert probe.summary()["collapse"] == pytest.approx(1.0, abs=1e-6)


def test_entropy_runs_from_identity_to_uniform():
    site = lw.HyperConnection(8, 4, cap=None)
    for bias, want in ((100.0 * torch.eye(4), 0.0), (torch.zeros(4, 4), math.log(4))):
        with torch.no_grad():
            site.base[8:] = bias.flatten()
        with lw.StreamProbe(site) as probe:
            site(torch.randn(5, 4, 8))
        assert probe.summary()["res_entropy"] == pytest.approx(want, abs=1e-5)


def test_one_entry_per_site_and_none_without_streams():
    tokens = torch.randint(0, 256, (2, 16))
    model = GPT(GPTConfig(dim=32, layers=3, context=16))
    with lw.StreamProbe(model) as probe:
        model(tokens)
        model(tokens)
    assert len(probe.summary()["site_collapse"]) == 6
    assert not model.blocks[0].site_ffn.observers
    plain = GPT(GPTConfig(dim=32, layers=3, context=16, residual="residual"))
    with lw.StreamProbe(plain) as probe:
        plain(tokens)
    assert probe.summary() == {}


def test_probing_changes_nothing_and_looks_at_a_bounded_sample():
    site, x = random_site(8, 4), torch.randn(5000, 4, 8)
    with torch.no_grad():
        h, merge = site(x)
        plain = merge(h)
        with lw.StreamProbe(site, tokens=64) as probe:
            h, merge = site(x)
            watched = merge(h)
    assert torch.equal(plain, watched)
    assert len(probe._records[site][0]) == 64


def test_no_tokens_no_figures():
    site = random_site(8, 4)
    with lw.StreamProbe(site) as probe:
        site(torch.randn(0, 4, 8))
    assert probe.summary() == {}
