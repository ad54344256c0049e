"""The maps of a converted model: the mathematics against float64, gradients at the start and after, streams that separate."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from convert_cases import KINDS, ONE_EACH, batch, loss_of, maps_of, move_maps, plain
from torch import Tensor

import laneway as lw
from laneway.connections import reference

# Smallest gradient norm of a map as a share of the largest in the model, in float64, where a dead map is at 1e-15. Next to the
# identity, a logit of H_res moves e⁻⁸ of it; a scale's gradient is one number, which may come out small by chance.
FLOOR = {"fn": 1e-5, "base": 1e-6, "scale": 1e-10}


def by_map(site: lw.HyperConnection, tensor: Tensor) -> dict[str, Tensor]:
    """Rows of pre, post and res of ``fn``, ``base`` or ``scale``."""
    n = site.streams
    sizes = [1, 1, 1] if len(tensor) == 3 else [n, n, len(tensor) - 2 * n]
    return dict(zip(("pre", "post", "res"), tensor.split(sizes), strict=True))


def gradients(model, name: str) -> list[dict[str, float]]:
    """Gradient norms of one parameter, map by map, site by site."""
    sites = [m for m in model.modules() if isinstance(m, lw.HyperConnection)]
    return [{k: v.norm().item() for k, v in by_map(s, getattr(s, name).grad).items()} for s in sites]


def train(model, kind: str, steps: int, lr: float = 3e-3) -> None:
    """A few optimizer steps on one batch; the gradients of one further step stay."""
    optimizer = torch.optim.AdamW(lw.param_groups(model), lr=lr)
    inputs = {k: v.to(model.dtype) if v.is_floating_point() else v for k, v in batch(kind, rows=4).items()}
    for step in range(steps + 1):
        optimizer.zero_grad()
        loss_of(model, kind, inputs).backward()
        if step < steps:
            optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
def test_projection_and_bias_of_every_map_have_a_gradient(kind):
    model = lw.convert(plain(kind).double())
    train(model, kind, steps=0)
    readout = next(module for name, module in maps_of(model).items() if name.endswith("readout"))
    for name in ("fn", "base"):
        norms = gradients(model, name)
        largest = max(max(norm.values()) for norm in norms)
        # The first site reads multiples of one embedding: the norm takes the multiple away, and its ε is what is left.
        assert norms[0].pop("pre") < 1e-2 * largest
        assert all(min(norm.values()) > FLOOR[name] * largest for norm in norms), (name, norms)
        assert getattr(readout, name).grad.norm() > FLOOR[name] * largest


@pytest.mark.parametrize("kind", ONE_EACH)
def test_scales_wake_with_the_first_update(kind):
    model = lw.convert(plain(kind).double())
    train(model, kind, steps=0)
    assert all(max(norm.values()) == 0.0 for norm in gradients(model, "scale")), "they multiply projections that are zero"
    train(model, kind, steps=2)
    norms = gradients(model, "scale")
    largest = max(max(norm.values()) for norm in norms)
    del norms[0]["pre"]
    assert all(min(norm.values()) > FLOOR["scale"] * largest for norm in norms), norms


@pytest.mark.parametrize(("manifold", "streams", "asleep"), [("sinkhorn", 2, "res"), ("kronecker", 4, "res"), ("none", 4, "pre")])
def test_what_sleeps_at_first_wakes_with_the_first_updates(manifold, streams, asleep):
    model = lw.convert(plain("llama").double(), streams, manifold=manifold)
    train(model, "llama", steps=0)
    norms = gradients(model, "base")
    largest = max(norm["post"] for norm in norms)
    assert max(norm[asleep] for norm in norms) < 1e-3 * largest
    if asleep == "res":  # not even the norm's ε is left
        assert max(norm[asleep] for norm in norms) < 1e-12 * largest
    before = [norm[asleep] for norm in norms[1:]]
    train(model, "llama", steps=3, lr=1e-2)
    norms = gradients(model, "base")
    largest = max(norm["post"] for norm in norms)
    assert all(norm[asleep] > max(1e-6 * largest, 3 * old) for norm, old in zip(norms[1:], before, strict=True)), norms


@pytest.mark.parametrize("kind", ONE_EACH)
def test_streams_stay_apart_under_training(kind):
    model = lw.convert(plain(kind))
    inputs = batch(kind)

    def apart() -> float:
        with torch.no_grad(), lw.StreamProbe(model) as probe:
            model(**inputs)
        return 1 - probe.summary()["site_collapse"][-1]

    before = apart()
    train(model, kind, steps=40, lr=1e-2)
    assert before > 1e-3, "writes differ from the start"
    assert apart() > 0.5 * before, "they fall together"


@pytest.mark.parametrize("kind", ONE_EACH)
def test_with_a_frozen_trunk_only_the_maps_train(kind):
    model = lw.convert(plain(kind))
    trunk = {name: p.clone() for name, p in model.named_parameters()}
    maps = {f"{name}.{p}" for name, module in maps_of(model).items() for p, _ in module.named_parameters()}
    for name, p in model.named_parameters():
        p.requires_grad_(name in maps)
    with torch.no_grad():
        before = loss_of(model, kind, inputs := batch(kind, rows=4)).item()
    optimizer = torch.optim.AdamW(lw.param_groups(model), lr=1e-2)
    for _ in range(10):
        optimizer.zero_grad()
        loss = loss_of(model, kind, inputs)
        loss.backward()
        optimizer.step()
    assert loss.item() < before
    for name, p in model.named_parameters():
        assert torch.equal(p, trunk[name]) == (name not in maps), name


def branches(kind: str, trunk, layer, length: int) -> list[Callable[[Tensor], Tensor]]:
    """The sub-layers between the residual additions of one plain layer, as transformers' own forward has them."""
    if kind == "llama":
        positions = trunk.rotary_emb(torch.zeros(1, length, 1, dtype=torch.float64), torch.arange(length)[None])
        return [
            lambda h: layer.self_attn(layer.input_layernorm(h), position_embeddings=positions)[0],
            lambda h: layer.mlp(layer.post_attention_layernorm(h)),
        ]
    if kind == "gpt2":
        return [lambda h: layer.attn(layer.ln_1(h))[0], lambda h: layer.mlp(layer.ln_2(h))]
    if kind == "gpt_neox":
        positions = trunk.rotary_emb(torch.zeros(1, length, 1, dtype=torch.float64), torch.arange(length)[None])

        def both(h: Tensor) -> Tensor:
            attention = layer.attention(layer.input_layernorm(h), None, position_embeddings=positions)[0]
            return attention + layer.mlp(layer.post_attention_layernorm(h))

        return [both]
    return [lambda h: layer.attention(layer.layernorm_before(h))[0], lambda h: layer.mlp(layer.layernorm_after(h))]


def by_reference(kind: str, model, inputs: Tensor, maps: dict[str, Tensor]) -> Tensor:
    """Output of the last norm, from plain float64 sub-layers and reference.connection."""
    from laneway.connections.families import FAMILIES

    family = FAMILIES[model.config.model_type]
    trunk = model.base_model
    if kind == "vit":
        x = trunk.embeddings(inputs)
    else:
        x = trunk.get_input_embeddings()(inputs)
        x = x + trunk.wpe(torch.arange(inputs.shape[1])) if kind == "gpt2" else x
    x = lw.expand_streams(x, 4, spread=lw.connections.expand_spread(4))
    prefix = f"{model.base_model_prefix}."
    for i, layer in enumerate(getattr(trunk, family.layers)):
        for name, branch in zip(family.sites(model.config), branches(kind, trunk, layer, x.shape[1]), strict=True):
            fn, base, scale = (maps[f"{prefix}{family.layers}.{i}.{name}.{p}"] for p in ("fn", "base", "scale"))
            x = reference.connection(x, branch, fn, base, scale, norm_eps=1e-6, cap=8.0)
    fn, base, scale = (maps[f"{prefix}readout.{p}"] for p in ("fn", "base", "scale"))
    weights = torch.sigmoid(reference.rms_norm(x.flatten(-2), 1e-6) @ fn.T * scale + base)
    return getattr(trunk, family.norm)(reference.pre_mix(x, weights))


@pytest.mark.parametrize("kind", ONE_EACH)
def test_outputs_and_gradients_are_the_references(kind):
    exact = plain(kind).double()
    model = move_maps(lw.convert(copy.deepcopy(exact).float()))
    names = [f"{name}.{p}" for name, module in maps_of(model).items() for p, _ in module.named_parameters()]
    maps = {name: model.get_parameter(name).detach().double().requires_grad_() for name in names}
    inputs = next(iter(batch(kind, rows=1).values())) if kind == "vit" else torch.randint(3, 61, (1, 9))
    want = by_reference(kind, exact, inputs.double() if kind == "vit" else inputs, maps)
    got = model.base_model(inputs).last_hidden_state
    assert (got - want).abs().max() < 1e-4 * want.abs().max()
    gy = torch.randn_like(want)
    want.backward(gy)
    got.backward(gy.float())
    for name in names:
        ours, theirs = model.get_parameter(name).grad, maps[name].grad
        assert (ours - theirs).norm() <= 1e-3 * theirs.norm() + 1e-6 * gy.norm(), name
    for name, p in exact.base_model.named_parameters():
        if p.grad is not None:
            ours = model.base_model.get_parameter(name).grad
            assert (ours - p.grad).norm() <= 1e-3 * p.grad.norm() + 1e-6 * gy.norm(), name
