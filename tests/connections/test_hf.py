"""transformers' models with our hyper-connections: the same function, the same parameters, and a way back."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

import laneway as lw
from laneway.connections import hf
from laneway.core import InputError

pytest.importorskip("transformers.models.glm5_next", reason="needs the `hf` extra: transformers ≥ 5.24")
from hf_models import MODELS, deepseek_v4, errors, exact_results, hy_v4_vl, results, tokens

pytestmark = pytest.mark.peers
ROUNDING = {torch.float32: 2**-24, torch.bfloat16: 2**-9}
# PEFT still asks transformers by an old name.
with_peft = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
every_model = pytest.mark.parametrize("build", MODELS.values(), ids=list(MODELS))


def reloaded(model: nn.Module, folder, **options) -> nn.Module:
    """The model saved and loaded again, as transformers does both."""
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder, **options)


@pytest.fixture(autouse=True)
def _quiet(one_thread):
    import transformers

    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()


@pytest.mark.parametrize("build", [*MODELS.values(), hy_v4_vl], ids=[*MODELS, "hy_v4_vl"])
@pytest.mark.parametrize("dtype", ROUNDING, ids=["fp32", "bf16"])
def test_outputs_and_gradients_are_as_near_to_float64_as_theirs(build, dtype, tmp_path):
    """Bound: 2 × their error; for biases and scales, a few numbers whose error is as often small by luck, + 10 roundings."""
    model = reloaded(build(), tmp_path, dtype=dtype).eval()
    ids = tokens()
    want = exact_results(model, ids)
    theirs = errors(results(model, ids), want)
    ours = errors(results(hf.accelerate_hf(model), ids), want)
    for kind, error in ours.items():
        assert error <= 2 * theirs[kind] + (10 * ROUNDING[dtype] if kind == "biases and scales" else 0), kind


@every_model
def test_names_parameters_and_their_order_stay(build):
    model = build()
    names, before = list(model.state_dict()), dict(model.named_parameters())
    modules = {name for name, _ in model.named_modules()}
    assert hf.accelerate_hf(model) is model
    assert list(model.state_dict()) == names
    assert [id(p) for p in model.parameters()] == [id(p) for p in before.values()]
    assert modules <= {name for name, _ in model.named_modules()}


def test_an_optimizer_made_before_goes_on():
    model = deepseek_v4()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    site = hf.accelerate_hf(model).model.layers[1].ffn_hc
    before = site.fn.detach().clone()
    results(model, tokens())
    optimizer.step()
    assert not torch.equal(site.fn, before)
    torch.testing.assert_close(site.fn, before - 1e-2 * site.fn.grad)


@every_model
def test_restored_is_the_original_bit_for_bit(build):
    model, ids = build(), tokens()
    before = results(model, ids)
    state = {name: (type(m), set(m.__dict__), list(m._modules)) for name, m in model.named_modules()}
    assert hf.restore_hf(hf.accelerate_hf(model)) is model
    assert {name: (type(m), set(m.__dict__), list(m._modules)) for name, m in model.named_modules()} == state
    after = results(model, ids)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_twice_is_harmless_and_so_is_restoring_nothing():
    model, ids = deepseek_v4(), tokens()
    hf.restore_hf(model)
    first = results(hf.accelerate_hf(model), ids)
    second = results(hf.accelerate_hf(model), ids)
    assert all(torch.equal(first[name], second[name]) for name in first)
    hf.restore_hf(model)
    assert not any(isinstance(m, lw.HyperConnection) for m in model.modules())


def test_a_site_that_layers_share_is_swapped_once():
    model, ids = deepseek_v4(), tokens()
    model.model.layers[2].attn_hc = model.model.layers[0].attn_hc
    before = results(model, ids)
    hf.restore_hf(hf.accelerate_hf(model))
    after = results(model, ids)
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("model", [nn.Linear(2, 2), "deepseek_v4", None], ids=["module", "name", "nothing"])
def test_other_models_are_refused_by_name(model):
    with pytest.raises(InputError) as caught:
        hf.accelerate_hf(model)
    assert caught.value.field == "model"
    for kind in ("deepseek_v4", "glm5_next", "hy_v4"):
        assert kind in str(caught.value)


def test_a_class_of_the_same_name_elsewhere_is_refused():
    impostor = type("DeepseekV4DecoderLayer", (nn.Module,), {})()
    with pytest.raises(InputError):
        hf.accelerate_hf(nn.Sequential(impostor))


def test_a_forward_patched_by_something_else_is_refused_and_nothing_changes():
    model = deepseek_v4()
    model.model.layers[2].forward = lambda *args, **kwargs: args[0]
    with pytest.raises(InputError, match="forward of its own"):
        hf.accelerate_hf(model)
    assert not any(isinstance(m, lw.HyperConnection) for m in model.modules())


@every_model
def test_saved_and_loaded_gives_the_same_numbers(build, tmp_path):
    """save_pretrained of an accelerated model loads into a plain one and into one that is accelerated after loading."""
    model, ids = hf.accelerate_hf(build()).eval(), tokens()
    logits = model(input_ids=ids).logits
    again = reloaded(model, tmp_path).eval()
    assert not any(isinstance(m, lw.StreamReadout) for m in again.modules())
    torch.testing.assert_close(again(input_ids=ids).logits, logits, rtol=1e-4, atol=1e-5)
    assert torch.equal(hf.accelerate_hf(again)(input_ids=ids).logits, logits)


def test_weights_may_be_loaded_after():
    source, target, ids = deepseek_v4(), hf.accelerate_hf(deepseek_v4()), tokens()
    target.load_state_dict(source.state_dict())
    assert torch.equal(results(hf.accelerate_hf(source), ids)["logits"], results(target, ids)["logits"])


def test_loaded_in_bf16_the_maps_stay_fp32(tmp_path):
    model = hf.accelerate_hf(reloaded(deepseek_v4(), tmp_path, dtype=torch.bfloat16))
    model.to(torch.bfloat16)
    assert model.lm_head.weight.dtype == torch.bfloat16
    for name, parameter in model.named_parameters():
        if "_hc." in name or "hc_head" in name:
            assert parameter.dtype == torch.float32, name


@every_model
def test_streams_keep_the_dtypes_of_the_original(build, tmp_path):
    model, ids = reloaded(build(), tmp_path, dtype=torch.bfloat16).eval(), tokens()
    before = model(input_ids=ids, output_hidden_states=True).hidden_states
    after = hf.accelerate_hf(model)(input_ids=ids, output_hidden_states=True).hidden_states
    assert [(h.dtype, h.shape) for h in after] == [(h.dtype, h.shape) for h in before]


@every_model
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_recomputes_and_changes_nothing(build, reentrant):
    model, ids = hf.accelerate_hf(build()).train(), tokens()
    layer = next(m for m in model.modules() if type(m).__name__ in hf.LAYERS)
    calls = []
    layer.input_layernorm.register_forward_hook(lambda *_: calls.append(1))
    before = results(model, ids)
    assert len(calls) == 1
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    after = results(model, ids)
    assert len(calls) == 3, "forward, forward again in the backward pass"
    assert all(torch.equal(after[name], before[name]) for name in before)


@every_model
def test_generated_tokens_are_those_of_the_original_with_and_without_cache(build):
    model, ids = build().eval(), tokens(2, 9)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    want = model.generate(ids, use_cache=True, **options)
    hf.accelerate_hf(model)
    assert torch.equal(model.generate(ids, use_cache=True, **options), want)
    assert torch.equal(model.generate(ids, use_cache=False, **options), want)


@pytest.mark.parametrize(
    "build",
    [pytest.param(build, id=name, marks=[pytest.mark.slow] if name != "deepseek_v4" else []) for name, build in MODELS.items()],
)
def test_the_trainer_trains_it_as_the_original(build, tmp_path):
    from transformers import Trainer, TrainingArguments

    torch.manual_seed(1)
    original = build()
    data = [{"input_ids": row, "labels": row} for row in tokens(12, 16)]
    losses = []
    for model in (original, hf.accelerate_hf(copy.deepcopy(original))):
        settings = TrainingArguments(
            output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=4, logging_steps=1, save_strategy="no",
            report_to=[], use_cpu=True, learning_rate=1e-3, dataloader_pin_memory=False, disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(model=model, args=settings, train_dataset=data)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert len(losses[0]) == 3
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@with_peft
@pytest.mark.parametrize("first", ["accelerate", "adapt"])
def test_lora_on_attention_has_the_gradients_of_the_original(first):
    peft = pytest.importorskip("peft", reason="needs the `hf` extra: peft")
    original, ids = deepseek_v4(), tokens()
    config = peft.LoraConfig(r=2, target_modules=["q_a_proj", "q_b_proj", "kv_proj"], init_lora_weights=False)
    ours = copy.deepcopy(original)
    torch.manual_seed(3)
    theirs = peft.get_peft_model(original, config)
    torch.manual_seed(3)
    if first == "accelerate":
        ours = peft.get_peft_model(hf.accelerate_hf(ours), config)
    else:
        ours = hf.accelerate_hf(peft.get_peft_model(ours, config))
    assert isinstance(ours.base_model.model.model.layers[0].attn_hc, lw.HyperConnection)
    want, got = results(theirs, ids), results(ours, ids)
    assert any("lora_A" in name for name in want)
    assert want.keys() == got.keys()
    for name, value in want.items():
        assert (got[name] - value).norm() <= 1e-4 * value.norm(), name


@with_peft
def test_sites_that_an_adapter_copied_are_accelerated_too():
    """PEFT's ``modules_to_save`` wraps a site and trains a copy of it."""
    peft = pytest.importorskip("peft", reason="needs the `hf` extra: peft")
    original, ids = deepseek_v4(), tokens()
    config = peft.LoraConfig(r=2, target_modules=["q_a_proj"], modules_to_save=["attn_hc"])
    model = peft.get_peft_model(original, config)
    want = results(model, ids)
    got = results(hf.accelerate_hf(model), ids)
    name = "base_model.model.model.layers.0.attn_hc.modules_to_save.default.fn"
    assert (got[name] - want[name]).norm() <= 1e-4 * want[name].norm()


def test_copies_and_pickles_work():
    model, ids = hf.accelerate_hf(deepseek_v4()), tokens()
    want = results(model, ids)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        got = results(other, ids)
        assert all(torch.equal(got[name], want[name]) for name in want)
        hf.restore_hf(other)
        assert not any(isinstance(m, lw.HyperConnection) for m in other.modules())


def test_under_hooks_of_accelerate_in_either_order():
    hooks = pytest.importorskip("accelerate.hooks", reason="needs the `hf` extra: accelerate")
    original, ids = deepseek_v4().eval(), tokens()
    want = hf.accelerate_hf(copy.deepcopy(original))(input_ids=ids).logits

    hooked = copy.deepcopy(original)
    for module in hooked.model.layers:
        hooks.add_hook_to_module(module, hooks.AlignDevicesHook("cpu", io_same_device=True))
    assert torch.equal(hf.accelerate_hf(hooked)(input_ids=ids).logits, want)
    hooks.remove_hook_from_module(hooked, recurse=True)
    assert torch.equal(hooked(input_ids=ids).logits, want)
    hf.restore_hf(hooked)
    assert torch.equal(hooked(input_ids=ids).logits, original(input_ids=ids).logits)


def test_layers_are_found_by_the_names_that_wrapping_looks_for():
    model = hf.accelerate_hf(deepseek_v4())
    assert {type(layer).__name__ for layer in model.model.layers} <= set(model._no_split_modules)


def test_our_tools_find_the_sites():
    model = hf.accelerate_hf(deepseek_v4())
    with lw.StreamProbe(model) as probe:
        model(input_ids=tokens())
    assert len(probe.summary()["site_gain_forward"]) == 6
    assert probe.summary()["gain_forward"] == pytest.approx(1.0, abs=1e-3)
    plain = {id(p) for group in lw.param_groups(model) if group["weight_decay"] == 0.0 for p in group["params"]}
    assert all(id(p) in plain for name, p in model.named_parameters() if "_hc." in name or "hc_head" in name)


def test_under_autocast_the_maps_stay_exact():
    model, ids = deepseek_v4().eval(), tokens()
    want = exact_results(model, ids)["logits"]
    off = {}
    for name, variant in (("theirs", model), ("ours", hf.accelerate_hf(copy.deepcopy(model)))):
        with torch.autocast("cpu", torch.bfloat16):
            off[name] = (variant(input_ids=ids).logits.double() - want).norm().item()
    assert off["ours"] <= off["theirs"]


@pytest.mark.distributed
def test_sharded_by_fsdp_it_computes_the_same_and_is_restored_before_only(tmp_path):
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    original, ids = deepseek_v4(), tokens()
    want = results(hf.accelerate_hf(copy.deepcopy(original)), ids)
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        model = lw.shard_connections(hf.accelerate_hf(original), mesh)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        got = results(fully_shard(model, mesh=mesh), ids)
        for name, value in want.items():
            whole = got[name].full_tensor() if hasattr(got[name], "full_tensor") else got[name]
            torch.testing.assert_close(whole, value, rtol=1e-4, atol=1e-6)
        with pytest.raises(InputError, match="before fully_shard"):
            hf.restore_hf(model)
    finally:
        distributed.destroy_process_group()
