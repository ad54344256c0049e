"""The start: equal to the plain network, every map alive, streams able to differ. docs/start.md derives it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import laneway as lw
from laneway.connections import start
from laneway.models.gpt import GPT, GPTConfig

# Smallest gradient norm of a map's rows of the projection at step 0, as a share of the largest in the model. Rounding noise
# is below 1e-7, where the maps of a dead start lie.
FLOOR = 1e-4
MANIFOLDS = ("mhc", "mhc-lite", "kronecker", "orthogonal", "identity")


def network(residual: str, streams: int, **options) -> GPT:
    torch.manual_seed(1)
    return GPT(GPTConfig(dim=64, layers=4, context=32, residual=residual, streams=streams, **options))


def loss_of(model: GPT, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def map_gradients(model: GPT) -> dict[str, list[float]]:
    """Norm of the projection's gradient for the rows of each map, site by site."""
    norms: dict[str, list[float]] = {"pre": [], "post": [], "res": []}
    for module in model.modules():
        if isinstance(module, lw.HyperConnection):
            n = module.streams
            for name, rows in zip(norms, module.fn.grad.split([n, n, len(module.fn) - 2 * n]), strict=True):
                norms[name].append(rows.norm().item())
    return norms


@pytest.mark.parametrize("residual", MANIFOLDS)
@pytest.mark.parametrize("streams", [1, 2, 3, 4, 5, 6])
def test_the_first_function_is_the_plain_networks(residual, streams):
    tokens = torch.randint(0, 256, (2, 32))
    plain, wide = network("residual", 1)(tokens), network(residual, streams)(tokens)
    assert (plain - wide).abs().max() < 5e-6 * plain.abs().max()


@pytest.mark.parametrize("streams", [2, 4])
def test_hc_starts_there_too_up_to_the_last_norms_epsilon(streams):
    tokens = torch.randint(0, 256, (2, 32))
    plain, wide = network("residual", 1, norm_eps=1e-12)(tokens), network("hc", streams, norm_eps=1e-12)(tokens)
    assert (plain - wide).abs().max() < 5e-6 * plain.abs().max()


@pytest.mark.parametrize("residual", ["mhc", "mhc-lite", "orthogonal"])
@pytest.mark.parametrize("streams", [3, 4, 5, 6])
def test_every_map_of_every_site_has_a_gradient(residual, streams):
    model = network(residual, streams)
    loss_of(model, torch.randint(0, 256, (4, 32))).backward()
    norms = map_gradients(model)
    largest = max(max(values) for values in norms.values())
    norms["pre"] = norms["pre"][1:]  # the first site reads multiples of one embedding, and its norm takes the multiple away
    for name, values in norms.items():
        assert min(values) > FLOOR * largest, (name, values)


@pytest.mark.parametrize(("residual", "streams"), [("mhc", 2), ("mhc", 4), ("kronecker", 4), ("mhc-lite", 2)])
def test_what_sleeps_at_first_wakes_after_one_update(residual, streams):
    """With two streams no exact start can give H_res a gradient; one optimizer step does."""
    model, tokens = network(residual, streams), torch.randint(0, 256, (4, 32))
    optimizer = torch.optim.AdamW(lw.param_groups(model), lr=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model, tokens).backward()
        optimizer.step()
    norms = map_gradients(model)
    largest = max(max(values) for values in norms.values())
    first = 1 if streams == 2 else 0  # two copies of one embedding stay alike, so the first site has nothing to mix
    assert min(norms["res"][first:]) > FLOOR * 1e-2 * largest


def test_two_streams_are_dead_to_rounding_as_derived():
    model = network("mhc", 2)
    loss_of(model, torch.randint(0, 256, (4, 32))).backward()
    norms = map_gradients(model)
    assert max(norms["res"]) < 1e-7 * max(norms["post"])


def test_uniform_zero_biases_are_a_dead_start():
    """What several public layers do: all maps zero. The streams get the same gradients for ever."""
    model, tokens = network("mhc", 4), torch.randint(0, 256, (4, 32))
    model.spread = 0.0
    for module in model.modules():
        if isinstance(module, lw.HyperConnection | lw.StreamReadout):
            with torch.no_grad():
                module.base.zero_()
    assert collapse_after(model, tokens, steps=20) > 1 - 1e-6


def test_streams_separate_under_training():
    assert collapse_after(network("mhc", 4), torch.randint(0, 256, (4, 32)), steps=20) < 0.999


def collapse_after(model: GPT, tokens: torch.Tensor, steps: int) -> float:
    optimizer = torch.optim.AdamW(lw.param_groups(model), lr=3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, tokens).backward()
        optimizer.step()
    with torch.no_grad(), lw.StreamProbe(model) as probe:
        model(tokens)
    return probe.summary()["site_collapse"][-1]


@pytest.mark.parametrize("n", range(1, 13))
def test_weights_of_the_start_obey_the_conditions(n):
    q = start.write_direction(n)
    assert abs(q.sum()) < 1e-6
    readout = start.readout_weights(n)
    assert abs(readout.sum() - 1) < 1e-6
    assert abs(readout @ q) < 1e-7
    reads = [start.read_weights(n, site) for site in range(2 * n)]
    for weights in reads:
        assert abs(weights.sum() - 1) < 1e-6
        assert abs(weights @ q) < 1e-7
        assert (weights > 0).all()
    assert (torch.stack(reads).amax(0) > 0.3).all(), "every stream is favoured by some site"
    if n >= 3:
        assert q.any()
        assert readout.std() > 0.01


def test_maps_come_back_through_the_sigmoid():
    weights = start.read_weights(4, 1)
    torch.testing.assert_close(torch.sigmoid(start.logit(weights)), weights, rtol=1e-6, atol=0)
    torch.testing.assert_close(2 * torch.sigmoid(start.logit(start.write_weights(4) / 2)), start.write_weights(4))


def test_v4_epsilon_is_taken_out_of_the_start():
    site = lw.HyperConnection(8, 4, eps=1e-3)
    torch.testing.assert_close(torch.sigmoid(site.base[:4].detach()) + 1e-3, start.read_weights(4, 0))
