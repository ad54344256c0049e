"""Saving, loading and generating with converted models."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from convert_cases import KINDS, ONE_EACH, WRITERS, batch, maps_of, move_maps, plain, transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import laneway as lw
from laneway.core import LanewayError


def write(model, inputs, **options) -> torch.Tensor:
    return model.generate(**inputs, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0, **options)


@pytest.mark.parametrize("kind", WRITERS)
def test_the_first_text_is_the_plain_models_with_and_without_cache(kind):
    model, inputs = plain(kind), batch(kind)
    want = write(model, inputs)
    lw.convert(model)
    assert torch.equal(write(model, inputs), want)
    assert torch.equal(write(model, inputs, use_cache=False), want)


@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt2", "gpt_neox"])
def test_with_trained_maps_the_cache_changes_nothing(kind):
    model, inputs = move_maps(lw.convert(plain(kind))), batch(kind)
    assert torch.equal(write(model, inputs), write(model, inputs, use_cache=False))


def test_beams_work():
    model, inputs = move_maps(lw.convert(plain("llama"))), batch("llama")
    assert torch.equal(write(model, inputs, num_beams=3), write(model, inputs, num_beams=3, use_cache=False))


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded_it_is_the_same_to_the_bit(kind, tmp_path):
    plain_model, inputs = plain(kind), batch(kind)
    names = set(plain_model.state_dict())
    model = move_maps(lw.convert(plain_model, streams=3, cap=None))
    model.save_pretrained(tmp_path / "wide")
    again = lw.load_converted(tmp_path / "wide")
    assert type(again) is type(model)
    assert not again.training
    assert torch.equal(again(**inputs).logits, model(**inputs).logits)
    assert names < set(again.state_dict()), "the trunk's names are unchanged"
    assert again.config.laneway == model.config.laneway
    assert len(again(**inputs, output_hidden_states=True).hidden_states) == 4


@torch.no_grad()
@pytest.mark.parametrize("manifold", ["birkhoff", "kronecker", "orthogonal", "identity", "none"])
def test_every_manifold_is_saved_and_loaded(manifold, tmp_path):
    model, inputs = move_maps_if_any(lw.convert(plain("llama"), manifold=manifold)), batch("llama")
    model.save_pretrained(tmp_path)
    assert torch.equal(lw.load_converted(tmp_path)(**inputs).logits, model(**inputs).logits)


def move_maps_if_any(model):
    for module in maps_of(model).values():
        for p in module.parameters():
            with torch.no_grad():
                p.add_(0.1 * torch.randn_like(p))
    return model


@torch.no_grad()
def test_one_stream_is_the_plain_residual_and_saves_too(tmp_path):
    plain_model, inputs = plain("llama"), batch("llama")
    before = plain_model(**inputs).logits
    lw.convert(plain_model, streams=1).save_pretrained(tmp_path)
    again = lw.load_converted(tmp_path)
    assert torch.equal(again(**inputs).logits, before)
    assert not [p for module in maps_of(again).values() for p in module.parameters()]


@torch.no_grad()
def test_shards_and_a_saved_copy_of_a_copy(tmp_path):
    model, inputs = move_maps(lw.convert(plain("llama"))), batch("llama")
    model.save_pretrained(tmp_path / "a", max_shard_size="30KB")
    assert len(list((tmp_path / "a").glob("*.safetensors"))) > 1
    lw.load_converted(tmp_path / "a").save_pretrained(tmp_path / "b")
    assert torch.equal(lw.load_converted(tmp_path / "b")(**inputs).logits, model(**inputs).logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_models_are_saved_and_loaded_with_fp32_maps(dtype, tmp_path):
    model = move_maps(lw.convert(plain("llama").to(dtype)))
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.get_slice("model.layers.0.site_ffn.fn").get_dtype() == "F32"
    for again in (lw.load_converted(tmp_path), lw.load_converted(tmp_path, dtype=dtype)):
        assert again.lm_head.weight.dtype == dtype
        for name, module in maps_of(again).items():
            for key, p in module.named_parameters():
                assert torch.equal(p, model.get_parameter(f"{name}.{key}")), name
                assert p.dtype == torch.float32
    wide = lw.load_converted(tmp_path, dtype=torch.float32)
    assert {p.dtype for p in wide.parameters()} == {torch.float32}


@pytest.mark.parametrize("kind", ONE_EACH)
def test_a_loaded_model_converts_back_while_its_maps_are_at_their_start(kind, tmp_path):
    model, inputs = plain(kind), batch(kind)
    want = {name: p.clone() for name, p in model.state_dict().items()}
    lw.convert(model).save_pretrained(tmp_path / "wide")
    again = lw.unconvert(lw.load_converted(tmp_path / "wide"))
    again.save_pretrained(tmp_path / "plain")
    loaded = type(again).from_pretrained(tmp_path / "plain")
    assert all(torch.equal(loaded.state_dict()[name], p) for name, p in want.items())
    assert not hasattr(loaded.config, "laneway")
    assert torch.equal(loaded(**inputs).logits, again(**inputs).logits)


@torch.no_grad()
def test_a_device_map_may_put_layers_on_the_disk(tmp_path):
    pytest.importorskip("accelerate", reason="needs accelerate")
    model, inputs = lw.convert(plain("llama")), batch("llama")
    model.save_pretrained(tmp_path / "wide")
    layers = {f"model.layers.{i}": "disk" if i == 1 else "cpu" for i in range(3)}
    rest = {
        "model.embed_tokens": "cpu",
        "model.norm": "cpu",
        "model.readout": "disk",
        "model.rotary_emb": "cpu",
        "lm_head": "cpu",
    }
    again = lw.load_converted(tmp_path / "wide", device_map=layers | rest, offload_folder=tmp_path / "offload")
    assert torch.equal(again(**inputs).logits, model(**inputs).logits)
    with pytest.raises(lw.InputError, match="dispatched over devices"):
        lw.unconvert(again)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # of peft's own call
@torch.no_grad()
def test_adapters_go_on_a_converted_model_but_not_the_other_way_round():
    peft = pytest.importorskip("peft", reason="needs peft")
    model, inputs = move_maps(lw.convert(plain("llama"))), batch("llama")
    before = model(**inputs).logits
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    assert torch.equal(adapted(**inputs).logits, before)
    with pytest.raises(lw.InputError, match="before it is wrapped"):
        lw.convert(adapted)


@pytest.fixture
def saved(tmp_path):
    lw.convert(plain("llama")).save_pretrained(tmp_path / "wide")
    return tmp_path / "wide"


def change_config(folder, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def test_a_missing_folder_and_a_plain_model_are_refused(tmp_path):
    with pytest.raises(lw.InputError, match="save_pretrained wrote of a converted model"):
        lw.load_converted(tmp_path / "nothing")
    plain("llama").save_pretrained(tmp_path)
    with pytest.raises(lw.InputError, match="no section laneway: convert the plain model first"):
        lw.load_converted(tmp_path)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"laneway": {"format": 2}}, "format 1 with cap, eps"),
        ({"laneway": "mhc"}, "no section laneway"),
        ({"architectures": ["Nothing"]}, "llama, Nothing"),
        ({"architectures": None}, "no architecture"),
        ({"model_type": "opt"}, "one of the families"),
    ],
)
def test_a_config_that_is_not_ours_is_refused(saved, changes, part):
    change_config(saved, **changes)
    with pytest.raises(lw.InputError) as caught:
        lw.load_converted(saved)
    assert part in str(caught.value)


def test_a_missing_map_is_not_begun_anew(saved):
    tensors = load_file(saved / "model.safetensors")
    del tensors["model.layers.1.site_ffn.base"]
    save_file(tensors, saved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(LanewayError, match=r"1 missing keys, first model\.layers\.1\.site_ffn\.base"):
        lw.load_converted(saved)


def test_weights_left_over_are_an_error(saved):
    tensors = load_file(saved / "model.safetensors")
    tensors["model.layers.9.site_ffn.base"] = tensors["model.layers.0.site_ffn.base"].clone()
    save_file(tensors, saved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(LanewayError, match="1 unexpected keys"):
        lw.load_converted(saved)


def test_options_of_from_pretrained_that_are_the_loaders_own(saved):
    with pytest.raises(lw.InputError, match="output_loading_info"):
        lw.load_converted(saved, output_loading_info=True)


def test_transformers_own_loader_sees_the_plain_names(saved, tmp_path):
    """What docs/convert.md warns of: it loads the trunk and says that the maps are unexpected."""
    shutil.copytree(saved, tmp_path / "copy")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "copy", output_loading_info=True)
    assert not info["missing_keys"]
    assert {name.split(".")[-2] for name in info["unexpected_keys"]} == {"site_attention", "site_ffn", "readout"}
    assert lw.convert(model).config.laneway["streams"] == 4
