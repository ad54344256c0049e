"""Low-rank adapters: the formula against float64, what they leave alone, merging and its exact undo, loading."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from cases import branch_for, error, random_site, rms_error
from torch import nn

from laneway.connections import HyperConnection, param_groups, reference
from laneway.connections.lora import (
    adapters,
    add_lora,
    load_lora_state_dict,
    lora_state_dict,
    merge,
    remove_lora,
    unmerge,
)
from laneway.connections.lora_layers import LoRAConnection, LoRALinear, adapters_off
from laneway.core import InputError, LanewayError
from laneway.models.gpt import GPT, GPTConfig

TARGETS = ("attention.qkv", "ffn.out", "site_ffn.fn")


def small_gpt() -> GPT:
    """A GPT far from its start, so that maps matter."""
    model = GPT(GPTConfig(layers=2, dim=32, context=16, init_std=0.2))
    for module in model.modules():
        if isinstance(module, HyperConnection):
            nn.init.normal_(module.fn, std=0.05)
    return model


def spread(model: nn.Module, std: float = 0.1) -> None:
    """Adapters that do something."""
    for layer in adapters(model).values():
        nn.init.normal_(layer.lora.B, std=std)


def tokens() -> torch.Tensor:
    return torch.randint(0, 256, (2, 16))


# -- what adding leaves alone


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_new_adapters_change_nothing(dtype):
    model, x = small_gpt().to(dtype), tokens()
    before = model(x)
    add_lora(model, TARGETS, rank=4)
    assert torch.equal(model(x), before)


def test_base_names_objects_and_values_stay():
    model = small_gpt()
    names, values = list(model.state_dict()), {k: v.clone() for k, v in model.state_dict().items()}
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    found = add_lora(model, TARGETS, rank=4)
    assert found == [f"blocks.{i}.{end}" for i in (0, 1) for end in ("attention.qkv", "ffn.out", "site_ffn")]
    state = model.state_dict()
    assert set(names) == {name for name in state if ".lora." not in name}
    assert all(torch.equal(state[name], value) for name, value in values.items())
    assert all(model.get_submodule(name) is module for name, module in modules.items())
    assert all(
        model.get_parameter(name) is parameter for name, parameter in parameters.items() if not name.endswith("site_ffn.fn")
    )
    assert model.head.weight is model.embedding.weight


def test_only_adapters_train():
    model = small_gpt()
    add_lora(model, TARGETS, rank=4)
    spread(model)
    model(tokens()).square().mean().backward()
    assert all((p.grad is not None) == (".lora." in name) for name, p in model.named_parameters())
    grouped = {id(p) for group in param_groups(model) for p in group["params"]}
    assert grouped == {id(p) for layer in adapters(model).values() for p in layer.lora.parameters()}


def test_a_second_call_keeps_the_first_ones_training():
    model = small_gpt()
    add_lora(model, "attention.qkv", rank=4)
    add_lora(model, "ffn.out", rank=2)
    assert sum(p.requires_grad for p in model.parameters()) == 8


def test_removing_gives_the_plain_model_back():
    model, x = small_gpt(), tokens()
    before, names, kinds = model(x), list(model.state_dict()), [type(m) for m in model.modules()]
    add_lora(model, TARGETS, rank=4)
    spread(model)
    remove_lora(model)
    assert torch.equal(model(x), before)
    assert list(model.state_dict()) == names
    assert [type(m) for m in model.modules()] == kinds


def test_factors_stay_wide_when_the_model_is_narrowed():
    model = small_gpt()
    add_lora(model, TARGETS, rank=4)
    model.to(torch.bfloat16)
    assert {p.dtype for layer in adapters(model).values() for p in layer.lora.parameters()} == {torch.float32}
    assert model.blocks[0].attention.qkv.weight.dtype == torch.bfloat16
    assert model(tokens()).isfinite().all()


# -- the formula


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_and_its_gradients_equal_float64(dtype):
    layer = nn.Sequential(nn.Linear(48, 32)).to(dtype)
    add_lora(layer, "0", rank=4, alpha=10.0)
    spread(layer, 0.3)
    lora = layer[0].lora
    x, gy = torch.randn(5, 7, 48).to(dtype), torch.randn(5, 7, 32).to(dtype)
    own = x.clone().requires_grad_()
    y = layer(own)
    y.backward(gy)
    wx, a, b = (t.detach().double().requires_grad_() for t in (x, lora.A, lora.B))
    want = wx @ layer[0].weight.detach().double().T + layer[0].bias.detach().double() + 10.0 / 4 * (wx @ a.T @ b.T)
    want.backward(gy.double())
    plain_x, plain_a, plain_b = (t.detach().to(dtype).requires_grad_() for t in (x, lora.A, lora.B))
    plain = nn.functional.linear(plain_x, layer[0].weight.detach(), layer[0].bias.detach()) + 2.5 * (
        plain_x @ plain_a.T @ plain_b.T
    )
    plain.backward(gy)
    for got, true, peer in zip((y, own.grad, lora.A.grad, lora.B.grad), (want, wx.grad, a.grad, b.grad),
                               (plain, plain_x.grad, plain_a.grad, plain_b.grad), strict=True):  # fmt: skip
        assert rms_error(got.detach(), true.detach()) <= 2 * rms_error(peer.detach(), true.detach()) + 1e-7


@pytest.mark.parametrize("manifold", ["sinkhorn", "birkhoff", "none"])
def test_map_and_its_gradients_equal_float64(manifold):
    model = nn.ModuleDict({"site": random_site(16, 4, manifold)})
    add_lora(model, "site.fn", rank=2, alpha=3.0)
    spread(model)
    site, branch = model["site"], branch_for(16)
    x, gy = torch.randn(9, 4, 16), torch.randn(9, 4, 16)
    h, write = site(x)
    y = write(branch(h))
    y.backward(gy)
    a, b = (t.detach().double().requires_grad_() for t in (site.lora.A, site.lora.B))
    fn = site.original().detach().double() + 1.5 * b @ a
    base, scale = site.base.detach().double(), site.scale.detach().double()
    if manifold == "none":
        want = reference.hc_connection(x.double(), branch, fn, base, scale, norm_eps=site.norm_eps)
    elif manifold == "sinkhorn":
        want = reference.connection(x.double(), branch, fn, base, scale, norm_eps=site.norm_eps, cap=site.cap)
    else:
        wide = copy.deepcopy(site).double()
        wide._parameters["fn"] = nn.Parameter(fn.detach())
        with adapters_off(wide):
            h64, write64 = wide(x.double())
            want = write64(branch(h64))
        assert error(y.detach(), want.detach()) < 1e-5
        return
    want.backward(gy.double())
    assert error(y.detach(), want.detach()) < 1e-5
    assert error(site.lora.A.grad, a.grad) < 2e-5
    assert error(site.lora.B.grad, b.grad) < 2e-5


def test_autocast_leaves_a_maps_adapter_in_fp32():
    model = nn.ModuleDict({"site": random_site(16, 4)})
    add_lora(model, "site.fn", rank=2)
    spread(model)
    x = torch.randn(3, 4, 16)
    h, _ = model["site"](x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        narrow, _ = model["site"](x)
    assert torch.equal(h, narrow)


def test_training_finds_a_low_rank_change():
    base, change = nn.Linear(24, 24, bias=False), 0.3 * torch.randn(24, 2) @ torch.randn(2, 24)
    model, target = nn.Sequential(copy.deepcopy(base)), base.weight.detach() + change
    add_lora(model, "0", rank=2, alpha=2.0)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 0.03)
    for _ in range(400):
        x = torch.randn(64, 24)
        loss = (model(x) - x @ target.T).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert rms_error(model[0].merged_weight(), target.double()) < 0.1 * rms_error(base.weight.detach(), target.double())
    assert torch.equal(model[0].weight, base.weight)


def test_dropout_is_for_training_alone():
    model = nn.Sequential(nn.Linear(32, 32))
    add_lora(model, "0", rank=4, dropout=0.5)
    spread(model, 1.0)
    x = torch.randn(4, 32)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


# -- merging


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unmerge_restores_every_bit(dtype):
    model = small_gpt().to(dtype)
    add_lora(model, TARGETS, rank=4, alpha=1e3)
    spread(model, 3.0)
    before, x = {name: t.clone() for name, t in model.state_dict().items()}, tokens()
    y = model(x)
    merge(model)
    assert not torch.equal(model.blocks[0].attention.qkv.weight, before["blocks.0.attention.qkv.weight"])
    unmerge(model)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert torch.equal(model(x), y)


def test_merged_function_is_the_same_to_rounding():
    model, x = small_gpt(), tokens()
    add_lora(model, TARGETS, rank=4)
    spread(model)
    true = copy.deepcopy(model).double()(x)
    plain = rms_error(model(x).detach(), true.detach())
    merge(model)
    assert rms_error(model(x).detach(), true.detach()) <= 2 * plain + 1e-7


def test_merged_base_can_still_be_had():
    model, x = small_gpt(), tokens()
    before = model(x)
    add_lora(model, TARGETS, rank=4)
    spread(model)
    merge(model)
    with adapters_off(model):
        assert torch.equal(model(x), before)
    assert not torch.equal(model(x), before)


def test_a_merged_state_dict_is_that_of_a_plain_model():
    model, x, plain = small_gpt(), tokens(), small_gpt()
    add_lora(model, TARGETS, rank=4)
    spread(model)
    merge(model)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(plain(x), model(x))


def test_loading_another_base_under_a_merged_adapter_is_refused():
    model, other = small_gpt(), small_gpt()
    add_lora(model, TARGETS, rank=4)
    merge(model)
    with pytest.raises(RuntimeError, match="unmerge first"):
        model.load_state_dict(other.state_dict())


def test_merge_twice_and_unmerge_of_nothing_are_refused():
    model = small_gpt()
    with pytest.raises(InputError, match="call add_lora first"):
        merge(model)
    add_lora(model, TARGETS, rank=4)
    with pytest.raises(InputError, match="not merged"):
        unmerge(model)
    merge(model)
    with pytest.raises(InputError, match="is merged"):
        merge(model)


def test_an_adapter_that_is_not_finite_is_not_merged():
    model = small_gpt()
    add_lora(model, TARGETS, rank=4)
    spread(model)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    adapters(model)["blocks.1.ffn.out"].lora.B.data[0, 0] = float("nan")
    with pytest.raises(LanewayError, match=r"blocks\.1\.ffn\.out"):
        merge(model)
    assert all(torch.equal(model.state_dict()[name], t) for name, t in before.items() if ".lora." not in name)
    assert not any(layer.lora.merged for layer in adapters(model).values())


# -- saving and loading


def test_adapters_go_from_one_model_to_another_with_their_scaling():
    base = small_gpt()
    one, other, x = copy.deepcopy(base), copy.deepcopy(base), tokens()
    add_lora(one, TARGETS, rank=4, alpha=64.0)
    spread(one)
    add_lora(other, TARGETS, rank=4)
    load_lora_state_dict(other, lora_state_dict(one))
    assert torch.equal(one(x), other(x))
    third = copy.deepcopy(base)
    add_lora(third, TARGETS, rank=4)
    third.load_state_dict(one.state_dict())
    assert torch.equal(one(x), third(x))


@pytest.mark.parametrize("change", ["shape", "name"])
def test_a_file_that_does_not_fit_loads_nothing(change):
    model, other = small_gpt(), small_gpt()
    add_lora(model, TARGETS, rank=4)
    add_lora(other, TARGETS if change == "shape" else TARGETS[:2], rank=2 if change == "shape" else 4)
    before = {name: t.clone() for name, t in lora_state_dict(model).items()}
    with pytest.raises(InputError):
        load_lora_state_dict(model, lora_state_dict(other))
    assert all(torch.equal(lora_state_dict(model)[name], t) for name, t in before.items())


def test_copies_and_pickles_work():
    model, x = small_gpt(), tokens()
    add_lora(model, TARGETS, rank=4)
    spread(model)
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), model(x))


def test_kinds_are_subclasses_of_what_they_adapt():
    model = small_gpt()
    add_lora(model, TARGETS, rank=4)
    assert {type(layer) for layer in adapters(model).values()} == {LoRALinear, LoRAConnection}
    assert isinstance(model.blocks[0].site_ffn, HyperConnection)


# -- bad input


@pytest.mark.parametrize(
    ("targets", "options", "part"),
    [
        ("attention.kqv", {}, "did you mean 'attention.qkv'?"),
        ((), {}, "at least one name"),
        ("head", {}, "embedding shares it"),
        ("embedding", {}, "it is a Embedding"),
        ("site_ffn", {}, "did you mean"),
        ("attention.qkv", {"rank": 0}, "an integer ≥ 1"),
        ("attention.qkv", {"rank": 33}, "at most 32"),
        ("site_ffn.fn", {"rank": 25}, "at most 24"),
        ("attention.qkv", {"alpha": 0.0}, "a number > 0"),
        ("attention.qkv", {"dropout": 1.0}, "from 0 to below 1"),
        (TARGETS, {"dropout": 0.1}, "0 where a map is a target"),
    ],
)
def test_bad_input_is_one_error_and_changes_nothing(targets, options, part):
    model = small_gpt()
    names = list(model.state_dict())
    with pytest.raises(InputError) as caught:
        add_lora(model, targets, **options)
    assert part in str(caught.value)
    assert list(model.state_dict()) == names
    assert all(p.requires_grad for p in model.parameters())


def test_a_layer_is_adapted_once():
    model = small_gpt()
    add_lora(model, "attention.qkv", rank=4)
    with pytest.raises(InputError, match="has one already"):
        add_lora(model, "qkv", rank=4)


def test_a_linear_layer_whose_forward_is_not_called_is_refused():
    with pytest.raises(InputError, match="forward is its own"):
        add_lora(nn.ModuleDict({"attention": nn.MultiheadAttention(32, 2)}), "attention.out_proj", rank=4)


def test_a_site_without_maps_is_refused():
    with pytest.raises(InputError, match="plain residual"):
        add_lora(nn.ModuleDict({"site": HyperConnection(16, 1)}), "site.fn", rank=4)
