"""convert: the same function at the start, alive maps, streams between layers. unconvert: the plain model back."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from convert_cases import KINDS, LAYERS, LENGTH, ONE_EACH, WIDTH, batch, loss_of, maps_of, move_maps, plain, transformers

import laneway as lw

MANIFOLDS = ("sinkhorn", "birkhoff", "kronecker", "orthogonal", "identity", "none")


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return ((a - b).abs().max() <= 1e-5 * max(1.0, b.abs().max().item())).item()


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_the_first_logits_are_the_plain_models(kind):
    model, inputs = plain(kind), batch(kind)
    before = model(**inputs).logits
    assert lw.convert(model) is model
    assert close(model(**inputs).logits, before)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_in_training_the_same_seed_drops_the_same(kind):
    model, inputs = plain(kind).train(), batch(kind)
    torch.manual_seed(3)
    before = model(**inputs).logits
    lw.convert(model)
    torch.manual_seed(3)
    assert close(model(**inputs).logits, before)
    assert all(module.training for module in model.modules())


@torch.no_grad()
@pytest.mark.parametrize("streams", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("manifold", MANIFOLDS)
def test_every_manifold_and_number_of_streams_starts_there(manifold, streams):
    model, inputs = plain("llama"), batch("llama")
    before = model(**inputs).logits
    lw.convert(model, streams, manifold=manifold, cap=None, eps=0.0)
    assert close(model(**inputs).logits, before)


@torch.no_grad()
def test_v4_epsilons_start_there_up_to_their_size():
    model, inputs = plain("llama"), batch("llama")
    before = model(**inputs).logits
    lw.convert(model, eps=1e-6, cap=None)
    assert (model(**inputs).logits - before).abs().max() < 1e-4 * before.abs().max()


@torch.no_grad()
@pytest.mark.parametrize("kind", ONE_EACH)
def test_streams_flow_between_layers(kind):
    model, inputs = lw.convert(plain(kind), streams=3), batch(kind)
    states = model(**inputs, output_hidden_states=True).hidden_states
    length = LENGTH if kind != "vit" else 10  # nine patches and the class token
    assert [tuple(x.shape) for x in states[:LAYERS]] == [(2, length, 3, WIDTH)] * LAYERS
    # Text models report the output of the last norm as the last state, ViT what goes into it.
    assert tuple(states[-1].shape) == ((2, length, 3, WIDTH) if kind == "vit" else (2, length, WIDTH))
    assert (states[1][..., 0, :] - states[1][..., 1, :]).abs().max() > 0.01


def test_attentions_can_still_be_asked_for():
    model = lw.convert(plain("llama", attn_implementation="eager"))
    found = model(**batch("llama"), output_attentions=True).attentions
    assert [tuple(a.shape) for a in found] == [(2, 4, LENGTH, LENGTH)] * LAYERS


def test_a_site_stands_for_every_residual_addition():
    for kind, count in {"llama": 2, "gpt_neox": 1, "gpt_neox-sequential": 2, "gpt2": 2, "vit": 2}.items():
        sites = [m for m in lw.convert(plain(kind)).modules() if isinstance(m, lw.HyperConnection)]
        assert [site.site for site in sites] == list(range(count * LAYERS))


def test_heads_other_than_language_models():
    for name in ("LlamaForSequenceClassification", "LlamaForTokenClassification", "LlamaModel"):
        base = plain("llama")
        model, inputs = getattr(transformers, name)(base.config).eval(), batch("llama")
        before = model(**inputs)[0]
        assert close(lw.convert(model)(**inputs)[0], before), name


@pytest.mark.parametrize("kind", ONE_EACH)
def test_checkpointed_gradients_are_the_same(kind):
    model, inputs = move_maps(lw.convert(plain(kind))), batch(kind)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    if kind == "gpt_neox":
        for layer in model.gpt_neox.layers:
            layer.attention.attention_dropout = 0.0
    model.train()
    loss_of(model, kind, inputs).backward()
    want = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model.activation_checkpointing_enable()
    calls: list[int] = []
    site = next(m for m in model.modules() if isinstance(m, lw.HyperConnection))
    site.register_forward_hook(lambda *_: calls.append(1))
    loss_of(model, kind, inputs).backward()
    assert len(calls) == 2, "forward, and again in the backward pass"
    for name, p in model.named_parameters():
        if name in want:
            torch.testing.assert_close(p.grad, want[name], rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("kind", ONE_EACH)
def test_bf16_trunk_keeps_the_maps_fp32_and_the_error_of_plain_bf16(kind):
    exact, inputs = plain(kind).double(), batch(kind, rows=4)
    narrow = copy.deepcopy(exact).to(torch.bfloat16)
    wide = lw.convert(copy.deepcopy(narrow))
    assert {p.dtype for m in maps_of(wide).values() for p in m.parameters()} == {torch.float32}
    floats = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    exact = copy.deepcopy(narrow).double()  # the weights as rounded
    with torch.no_grad():
        want = exact(**floats).logits
        errors = [(model(**inputs).logits.double() - want).norm() / want.norm() for model in (narrow, wide)]
    assert errors[1] <= 2 * errors[0], errors


def test_under_autocast_it_trains():
    model, inputs = lw.convert(plain("llama")), batch("llama")
    with torch.autocast("cpu", torch.bfloat16):
        loss_of(model, "llama", inputs).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_float64_models_get_float64_maps():
    model = lw.convert(plain("llama").double())
    assert {p.dtype for p in model.parameters()} == {torch.float64}


def test_a_narrow_default_dtype_does_not_narrow_the_start():
    want = [p.clone() for m in maps_of(lw.convert(plain("llama"))).values() for p in m.parameters()]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = lw.convert(plain("llama"))
        assert lw.unconvert(copy.deepcopy(model))
    finally:
        torch.set_default_dtype(before)
    got = [p for m in maps_of(model).values() for p in m.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@torch.no_grad()
@pytest.mark.parametrize("kind", ONE_EACH)
def test_a_copy_shares_nothing(kind):
    model, inputs = move_maps(lw.convert(plain(kind))), batch(kind)
    before = model(**inputs).logits
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(**inputs).logits, before)
        for p in other.parameters():
            p.zero_()
        assert torch.equal(model(**inputs).logits, before)


@pytest.mark.parametrize("kind", KINDS)
def test_unconvert_gives_the_plain_model_back(kind):
    model, inputs = plain(kind), batch(kind)
    twin = copy.deepcopy(model)
    assert lw.unconvert(lw.convert(model)) is model
    assert repr(model) == repr(twin)
    assert model.config.to_dict() == twin.config.to_dict()
    assert model._no_split_modules == twin._no_split_modules
    assert model._keep_in_fp32_modules_strict == twin._keep_in_fp32_modules_strict
    state, want = model.state_dict(), twin.state_dict()
    assert list(state) == list(want)
    assert all(torch.equal(state[name], want[name]) for name in want)
    assert torch.equal(model(**inputs).logits, twin(**inputs).logits)
    assert close(lw.convert(model)(**inputs).logits, twin(**inputs).logits), "and it converts again"


def test_unconvert_is_refused_once_a_map_has_moved():
    model, inputs = lw.convert(plain("llama")), batch("llama")
    with torch.no_grad():
        model.model.layers[1].site_ffn.base[0] += 1e-3
        before = model(**inputs).logits
        with pytest.raises(lw.InputError, match=r"layers\.1\.site_ffn.*maps are all at their start"):
            lw.unconvert(model)
        assert torch.equal(model(**inputs).logits, before)


def test_a_trained_trunk_with_maps_at_their_start_converts_back():
    model, inputs = lw.convert(plain("llama")), batch("llama")
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
        before = model(**inputs).logits
        assert close(lw.unconvert(model)(**inputs).logits, before)


class OwnLayer(transformers.models.llama.modeling_llama.LlamaDecoderLayer):
    pass


def _own_layer(model):
    model.model.layers[1].__class__ = OwnLayer
    return model


def _wrapped(model):
    model.model.layers[0].forward = model.model.layers[0].forward
    return model


def _opt():
    config = transformers.OPTConfig(vocab_size=61, hidden_size=16, num_hidden_layers=1, ffn_dim=16, num_attention_heads=2)
    return transformers.OPTForCausalLM(config)


@pytest.mark.parametrize(
    ("make", "options", "part"),
    [
        (_opt, {}, "one of the families llama, mistral, qwen2, qwen3, gpt2, gpt_neox, vit"),
        (lambda: torch.nn.Linear(2, 2), {}, "got 'Linear'"),
        (lambda: lw.convert(plain("llama")), {}, "converted already"),
        (lambda: _own_layer(plain("llama")), {}, "layers of the class LlamaDecoderLayer"),
        (lambda: _wrapped(plain("llama")), {}, "convert first, then dispatch"),
        (lambda: plain("gpt2", add_cross_attention=True), {}, "add_cross_attention"),
        (lambda: plain("llama"), {"streams": 0}, "streams: got 0"),
        (lambda: plain("llama"), {"manifold": "sinkhron"}, "did you mean 'sinkhorn'?"),
        (lambda: plain("llama"), {"streams": 7, "manifold": "birkhoff"}, "use sinkhorn"),
        (lambda: plain("llama"), {"cap": -1.0}, "cap: got -1.0"),
        (lambda: plain("llama"), {"iterations": 0}, "iterations: got 0"),
    ],
)
def test_bad_input_is_one_clear_error_and_changes_nothing(make, options, part):
    model = make()
    before = repr(model), list(model.state_dict())
    with pytest.raises(lw.InputError) as caught:
        lw.convert(model, **options)
    assert part in str(caught.value)
    assert (repr(model), list(model.state_dict())) == before


def test_unconvert_of_a_plain_model_is_refused():
    with pytest.raises(lw.InputError, match=r"a model that laneway\.convert"):
        lw.unconvert(plain("llama"))


def test_without_transformers_it_says_what_to_install(monkeypatch):
    model = plain("llama")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(lw.InputError, match=r"pip install 'laneway\[hf\]'"):
        lw.convert(model)
    with pytest.raises(lw.InputError, match=r"pip install 'laneway\[hf\]'"):
        lw.load_converted("anywhere")


@torch.no_grad()
def test_the_first_layer_expands_its_input_however_it_is_given():
    layer = lw.convert(plain("gpt2"), streams=3).transformer.h[0]
    x = torch.randn(2, 5, WIDTH)
    by_place, by_name = layer(x), layer(hidden_states=x)
    assert by_place.shape == (2, 5, 3, WIDTH)
    assert torch.equal(by_place, by_name)


FSDP = """
import os, sys, torch, torch.distributed as dist
sys.path.insert(0, sys.argv[1])
import laneway as lw
from convert_cases import batch, loss_of, move_maps, plain
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=0, world_size=1)
mesh, inputs = init_device_mesh("cpu", (1,)), batch("llama")
for options in ({}, {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}):
    model = move_maps(lw.convert(plain("llama")))
    loss = loss_of(model, "llama", inputs)
    loss.backward()
    want = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    lw.shard_connections(model, mesh)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    again = loss_of(model, "llama", inputs)
    again.backward()
    assert torch.equal(again, loss) or options and abs(again - loss) < 0.05 * loss, (again, loss)
    for name, p in model.named_parameters():
        assert p.dtype == torch.float32 and p.grad.full_tensor().isfinite().all(), name
        assert options or torch.equal(p.grad.full_tensor(), want[name]), name
dist.destroy_process_group()
"""


@pytest.mark.distributed
def test_fsdp2_shards_a_converted_model(tmp_path):
    """One rank, in a process of its own: fp32 bit for bit, and bf16 layers with fp32 maps."""
    command = [sys.executable, "-c", FSDP, str(Path(__file__).parent), str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
