"""PEFT's LoRA on models with hyper-connections: our GPT, and a Llama that ``laneway.convert`` turned."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import laneway as lw
from laneway.connections import HyperConnection
from laneway.connections.consistency import ConsistencyCheck
from laneway.connections.lora import add_lora, merge, unmerge
from laneway.models.gpt import GPT, GPTConfig

peft = pytest.importorskip("peft", reason="needs the package peft")
pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)  # PEFT still asks for it


def small_gpt() -> GPT:
    model = GPT(GPTConfig(layers=2, dim=32, context=16, init_std=0.2))
    for module in model.modules():
        if isinstance(module, HyperConnection):
            nn.init.normal_(module.fn, std=0.05)
    return model


def tokens(size: int = 256) -> torch.Tensor:
    return torch.randint(0, size, (2, 16))


def wrapped(model: nn.Module, **options) -> nn.Module:
    return peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, **options))


def train(model: nn.Module, check: ConsistencyCheck, steps: int = 4, size: int = 256) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)
    for step in range(1, steps + 1):
        check.on_step_begin(step)
        y = model(tokens(size))
        (y if isinstance(y, torch.Tensor) else y.logits).square().mean().backward()
        check.on_backward_end(step)
        optimizer.step()
        optimizer.zero_grad()
        check.on_step_end(step, {})


@pytest.mark.parametrize("options", [{}, {"target_parameters": ["site_ffn.fn"]}], ids=["layers", "maps"])
def test_a_healthy_fine_tune_raises_no_alarm(options):
    model, x = small_gpt(), tokens()
    before, check = model(x), ConsistencyCheck(model, x, "stop", every=2)
    tuned = wrapped(model, target_modules=["qkv", "ffn.out"], **options)
    assert torch.equal(tuned(x), before)
    check.begin()
    train(tuned, check)
    assert check.findings == []
    assert len(check.adapters) == (6 if options else 4)
    assert check.figures["contribution"] > 0
    assert not torch.equal(tuned(x), before)
    with tuned.disable_adapter():
        assert torch.equal(tuned(x), before)


def test_maps_stay_wide_under_peft():
    model = small_gpt()
    tuned = wrapped(model, target_modules=["qkv"], target_parameters=["site_ffn.fn"]).to(torch.bfloat16)
    assert model.blocks[0].site_ffn.base_layer.fn.dtype == torch.float32
    assert tuned(tokens()).isfinite().all()


def test_merging_and_unmerging_keeps_the_base_to_rounding():
    model, x = small_gpt(), tokens()
    before, check = model(x), ConsistencyCheck(model, x, "record")
    tuned = wrapped(model, target_modules=["qkv"])
    check.begin()
    train(tuned, check, 2)
    y = tuned(x)
    tuned.merge_adapter()
    assert torch.allclose(tuned(x), y, atol=1e-4)
    tuned.unmerge_adapter()
    with tuned.disable_adapter():
        assert torch.allclose(tuned(x), before, atol=1e-4)
    assert check.check(3) == []


def test_a_merged_layer_is_named():
    model = small_gpt()
    check = ConsistencyCheck(model, tokens(), "record")
    tuned = wrapped(model, target_modules=["qkv"])
    check.begin()
    tuned.merge_adapter()
    assert {(f.layer, f.measure) for f in check.check(1)} == {(f"blocks.{i}.attention.qkv", "merged") for i in (0, 1)}
    assert all(block.attention.qkv.merged for block in model.blocks)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"target_modules": ["qkv", "embedding"]}, {("embedding", "target"), ("embedding", "tied")}),
        ({"target_modules": ["qkv"], "target_parameters": ["readout.fn"]}, {("readout", "target")}),
        ({"target_modules": ["qkv"], "init_lora_weights": False}, {("blocks.0.attention.qkv", "start")}),
    ],
)
def test_a_wrong_start_is_found(options, expected):
    model = small_gpt()
    check = ConsistencyCheck(model, tokens(), "record")
    wrapped(model, **options)
    assert expected <= {(f.layer, f.measure) for f in check.begin()}


def test_a_layer_at_fault_is_named():
    model = small_gpt()
    check = ConsistencyCheck(model, tokens(), "record")
    tuned = wrapped(model, target_modules=["qkv"])
    check.begin()
    train(tuned, check, 2)
    model.blocks[1].attention.qkv.scaling["default"] *= 3
    assert {(f.layer, f.measure) for f in check.check(3)} == {("blocks.1.attention.qkv", "law")}
    model.blocks[0].attention.qkv.base_layer.weight.data.mul_(1.001)
    assert ("blocks.0.attention.qkv", "base") in {(f.layer, f.measure) for f in check.check(4)}


# -- a converted Llama


def converted_llama():
    if not hasattr(lw, "convert"):
        pytest.skip("needs laneway.convert")
    transformers = pytest.importorskip("transformers", reason="needs the package transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    model = lw.convert(transformers.LlamaForCausalLM(config), streams=4)
    for module in model.modules():
        if isinstance(module, HyperConnection):
            nn.init.normal_(module.fn, std=0.05)
    return model


def test_peft_on_a_converted_llama():
    model, x = converted_llama(), tokens(64)
    before, check = model(x).logits, ConsistencyCheck(model, x, "stop", every=2)
    tuned = wrapped(model, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    assert torch.equal(tuned(x).logits, before)
    check.begin()
    train(tuned, check, size=64)
    assert check.findings == []
    assert check.adapters[0].name == "model.layers.0.self_attn.q_proj"
    check.policy = "record"
    model.model.layers[1].mlp.down_proj.base_layer.weight.data.mul_(1.01)
    assert ("model.layers.1.mlp.down_proj", "base") in {(f.layer, f.measure) for f in check.check(5)}


def test_our_adapters_on_a_converted_llama():
    model, x = converted_llama(), tokens(64)
    sites = [name for name, module in model.named_modules() if isinstance(module, HyperConnection)]
    before, check = model(x).logits, ConsistencyCheck(model, {"input_ids": x}, "stop", every=2)
    add_lora(model, ["q_proj", "down_proj", f"{sites[0]}.fn"], rank=4)
    assert torch.equal(model(x).logits, before)
    check.begin()
    train(model, check, size=64)
    merge(model)
    check.check(5)
    unmerge(model)
    check.check(6)
    assert check.findings == []
    assert len(check.adapters) == 5
